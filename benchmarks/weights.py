"""Measures loading and saving weights on local processes, compared with other libraries: time, memory, bytes sent.

    python benchmarks/weights.py                                  # prints the tables; some minutes, a few GB of disk
    python benchmarks/weights.py --write docs/benchmarks.md       # and puts them into the page
    python benchmarks/weights.py --megabytes 64 --part load       # one table, of a small model

Each figure is of sharded models on two ranks (gloo): the least time of rounds in which all contenders take turns, and the
most memory of all ranks. In a round contenders come in a random order, and before each measurement the machine is brought to
one state: the model's files are read into the page cache, and as much memory as will be needed is written to and given back,
by all ranks at once, at the last moment. What new memory costs differs from second to second where a machine is shared: what
is written to new memory is timed several times in each round.

Memory and results are those of a round that is not timed, as looking takes time from who works. Memory is what the process
alone holds (RssAnon), sampled every 2 ms while it runs, less what it held before; what a model was given and nothing has been
written to does not count. Bytes on the wire are those of the tensors that collectives are called with. Before a table is
printed, every rank's shards, rank 0's whole tensors and the files are equal to the last bit.

torchtune's algorithms are written anew here from what its recipes do; the other contenders are the libraries' own functions.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import math
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.testing import RankPool

__all__ = ["PARTS", "build", "main", "table"]

RANKS = 2
REPEATS = 5
TIMES_NEW = 3  # in each round


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


class Stack(nn.Module):
    """Blocks of some size: nothing is computed here, only moved."""

    def __init__(self, megabytes: int, dim: int = 1024):
        super().__init__()
        dim = dim if megabytes >= 256 else 128
        count = max(2, round(megabytes * 2**20 / (8 * dim * dim * 4)))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(count))
        self.head = nn.Linear(dim, 1001, bias=False)  # an odd number of rows: the ranks' shards are not alike


def build(megabytes: int) -> nn.Module:
    return Stack(megabytes)


# ---- models, sharded with memory and without values ---------------------------------------------------------------------


def by_hand(world: sw.World, megabytes: int) -> nn.Module:
    with torch.device("meta"):
        module = build(megabytes)
    mesh = world.mesh["dp_shard"]
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module.to_empty(device="cpu")


def ours(world: sw.World, megabytes: int) -> nn.Module:
    return sw.parallelize(lambda: build(megabytes), world, init="load", sharding=sw.Sharding(min_unit_bytes=0))


# ---- loading ------------------------------------------------------------------------------------------------------------


def load_ours(model: nn.Module, folder: str) -> None:
    sw.load_weights(model, folder)


def load_dcp(model: nn.Module, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(folder))


def load_slices(model: nn.Module, folder: str) -> None:
    """What a careful user writes by hand with safetensors: rows of each tensor, for even cuts of dim 0 only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.ExitStack() as stack, torch.no_grad():
        files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(Path(folder).glob("*.safetensors"))]
        homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
        for name, param in model.named_parameters():
            rows = -(-param.shape[0] // size)
            part = homes[name].get_slice(name)[rank * rows : (rank + 1) * rows]
            param.to_local().copy_(part)  # type: ignore[attr-defined]


def load_torch_full(model: nn.Module, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state = _whole_files(folder) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def load_torchtune(model: nn.Module, folder: str) -> None:
    """Every rank opens all files, cuts each whole tensor for itself, and assigns."""
    own = dict(model.named_parameters())
    cut = {}
    for name, whole in _whole_files(folder).items():
        param: Any = own[name]
        cut[name] = nn.Parameter(distribute_tensor(whole, param.device_mesh, param.placements))
    model.load_state_dict(cut, strict=True, assign=True)


def load_accelerate(model: nn.Module, folder: str) -> None:
    from accelerate import PartialState
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    state = _whole_files(folder) if dist.get_rank() == 0 else {}
    accelerator = argparse.Namespace(is_main_process=dist.get_rank() == 0, device=torch.device("cpu"))
    PartialState(cpu=True)
    fsdp2_load_full_state_dict(accelerator, model, state)


def _whole_files(folder: str) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}


LOADERS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module, str], None]]] = {
    "Shardwise `load_weights`": (ours, load_ours),
    "torch DCP, Hugging Face reader": (by_hand, load_dcp),
    "the same, `THP_MEM_ALLOC_ENABLE=1`": (by_hand, load_dcp),
    "safetensors slices, by hand": (by_hand, load_slices),
    "torch `set_model_state_dict` from rank 0": (by_hand, load_torch_full),
    "torchtune's algorithm": (by_hand, load_torchtune),
    "accelerate `fsdp2_load_full_state_dict`": (by_hand, load_accelerate),
}

# What the processes of a contender find in their environment besides. With this torch asks for large pages as we do.
ENVIRONMENTS = {"the same, `THP_MEM_ALLOC_ENABLE=1`": {"THP_MEM_ALLOC_ENABLE": "1"}}


# ---- gathering ----------------------------------------------------------------------------------------------------------


def gather_ours(model: nn.Module) -> dict[str, Any]:
    return sw.full_state_dict(model)


def gather_torch(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def gather_torchtune(model: nn.Module) -> dict[str, Any]:
    """Each tensor whole on every rank, kept by rank 0."""
    found = {}
    for name, param in model.state_dict().items():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        if dist.get_rank() == 0:
            found[name] = whole.cpu()
    dist.barrier()
    return found


GATHERERS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], dict[str, Any]]]] = {
    "Shardwise `full_state_dict`": (ours, gather_ours),
    "torch `get_model_state_dict`": (by_hand, gather_torch),
    "torchtune's algorithm": (by_hand, gather_torchtune),
}


# ---- saving -------------------------------------------------------------------------------------------------------------


def save_ours(model: nn.Module, dest: str) -> None:
    sw.save_weights(model, dest)


def save_gathered(model: nn.Module, dest: str) -> None:
    """Whole on rank 0, written by safetensors, put on disk as ours is."""
    state = gather_torch(model)
    if dist.get_rank() == 0:
        os.makedirs(dest, exist_ok=True)
        file = os.path.join(dest, "model.safetensors")
        save_file(state, file)
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    dist.barrier()


def save_dcp(model: nn.Module, dest: str) -> None:
    """Shards first, then put together in a second pass."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(
        dest, save_distributed=True, enable_consolidation=True, thread_count_consolidation=1
    )
    dcp.save(model.state_dict(), storage_writer=writer)


SAVERS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module, str], None]]] = {
    "Shardwise `save_weights`": (ours, save_ours),
    "torch `get_model_state_dict`, safetensors, fsync": (by_hand, save_gathered),
    "torch DCP, Hugging Face writer, consolidated": (by_hand, save_dcp),
}


# ---- measuring ----------------------------------------------------------------------------------------------------------


class Sampler:
    """Peak of what this process alone holds, above what it held at first, in bytes."""

    def __enter__(self) -> "Sampler":
        gc.collect()
        self.first = self.peak = _private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, _private_bytes())

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _private_bytes())

    @property
    def grown(self) -> int:
        return self.peak - self.first


def _private_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class WireBytes(TorchDispatchMode):
    """Bytes of the tensors that collectives are called with, but for the exchanges of a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            found: list[torch.Tensor] = []
            torch.utils._pytree.tree_map_only(torch.Tensor, found.append, (args, kwargs or {}))
            size = sum(tensor.numel() * tensor.itemsize for tensor in found)
            self.total += size if size > 8192 else 0
        return func(*args, **(kwargs or {}))


def _digest(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, tuple[list[int], int]]:
    """Name -> shape and a sum over the bits."""
    found = {}
    for name, tensor in tensors:
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        bits = local.contiguous().view(-1).view(torch.int32).to(torch.int64)
        place = torch.arange(1, bits.numel() + 1)
        found[name] = (list(local.shape), int((bits * place).sum()))
    return found


def _give_back() -> None:
    """Nothing that was freed stays with the process: what it takes next is new memory, for every contender and in every round.
    (What malloc keeps depends on the sizes asked for, which are not the same for all.)"""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def run_load(contender: str, megabytes: int, folder: str, check: bool) -> dict[str, Any]:
    """Seconds; or, in a run that nobody times, memory in shards, what went over the wire and what came of it."""
    make, load = LOADERS[contender]
    with sw.init("dp_shard=-1", device="cpu") as world:
        model = _unwritten(make, world, megabytes)
        shard = sum(_local(param).numel() * 4 for param in model.parameters())
        if check:
            with Sampler() as sampler, WireBytes() as wire:
                load(model, folder)
            memory = sampler.grown / shard
            return {"memory": memory, "wire": wire.total, "digest": _digest(model.named_parameters())}

        def timed(model: nn.Module) -> float:
            return _timed(lambda: load(model, folder), folder, 2 * shard)

        new = [timed(model)]
        for _ in range(TIMES_NEW - 1):
            del model
            model = _unwritten(make, world, megabytes)
            new.append(timed(model))
        again = timed(model)
        del model
        _give_back()  # other contenders want it while this process waits for its next turn
        return {"seconds": min(new), "again": again}


def _unwritten(make: Callable[..., nn.Module], world: sw.World, megabytes: int) -> nn.Module:
    """A model whose memory is new; that of the one before is given back."""
    _give_back()
    return make(world, megabytes)


def _keep() -> None:
    """From now on what was freed stays with the process: what it takes next is memory in use, for every contender.
    (malloc gives back tensors of some MiB at once, others at the end of its heap.)"""
    libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # of malloc.h
    assert libc.mallopt(trim_threshold, -1) and libc.mallopt(mmap_threshold, 32 << 20)


def run_gather(contender: str, megabytes: int, folder: str, check: bool) -> dict[str, Any]:
    """Seconds; or, in a run that nobody times, memory in models and what came of it."""
    _keep()
    make, gather = GATHERERS[contender]
    with sw.init("dp_shard=-1", device="cpu") as world:
        model = _filled(make, world, megabytes, folder)
        whole = _whole_bytes(model)
        _give_back()
        if check:
            with Sampler() as sampler:
                found = gather(model)
            return {"memory": sampler.grown / whole, "digest": _digest(iter(found.items()))}
        new = []
        for _ in range(TIMES_NEW):
            _give_back()
            new.append(_timed(lambda: gather(model), folder, whole))
        return {"seconds": min(new), "again": _timed(lambda: gather(model), folder, whole)}


def run_save(contender: str, megabytes: int, folder: str, dest: str, check: bool) -> dict[str, Any]:
    """Seconds; or, in a run that nobody times, memory in models."""
    make, save = SAVERS[contender]
    with sw.init("dp_shard=-1", device="cpu") as world:
        model = _filled(make, world, megabytes, folder)
        whole = _whole_bytes(model)
        _give_back()
        if check:
            with Sampler() as sampler:
                save(model, dest)
            return {"memory": sampler.grown / whole}
        return {"seconds": _timed(lambda: save(model, dest), folder, whole)}


def _filled(make: Callable[..., nn.Module], world: sw.World, megabytes: int, folder: str) -> nn.Module:
    model = make(world, megabytes)
    load_ours(model, folder) if make is ours else load_slices(model, folder)
    return model


def _whole_bytes(model: nn.Module) -> int:
    return sum(param.numel() * 4 for param in model.parameters())


def _settle(folder: str | Path, num_bytes: int) -> None:
    """One state of the machine for all: a file that left the page cache, or memory that the host of a virtual machine has taken
    back, would be charged to whoever comes next."""
    _settle_files(Path(folder).iterdir())
    given = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared comes in small pages
    if hasattr(given, "madvise"):
        given.madvise(mmap.MADV_HUGEPAGE)  # so that it is in large blocks, which a host takes back first
    np.frombuffer(given, np.uint8).fill(1)
    dist.barrier()  # given back by all at once, just before it is needed: a host may take what is free for two seconds
    given.close()


def _settle_files(paths: Iterable[Path]) -> None:
    scratch = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def _timed(act: Callable[[], Any], folder: str, room: int) -> float:
    """Seconds until all ranks are done. Before, ``folder`` is read and ``room`` bytes are written to."""
    _settle(folder, room)
    dist.barrier()
    start = time.perf_counter()
    result = act()
    dist.barrier()
    seconds = time.perf_counter() - start
    del result  # kept until now: giving memory back takes time too
    return seconds


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


# ---- tables -------------------------------------------------------------------------------------------------------------

Rows = dict[str, dict[str, Any]]
Runs = dict[str, list[list[dict[str, Any]]]]
MEMORIES = {"seconds": "time, into new memory", "again": "into memory in use"}


def part_load(megabytes: int, repeats: int, work: Path) -> str:
    given = (megabytes, str(work / "model"))
    checked = _rounds(run_load, LOADERS, 1, lambda _: (*given, True))
    _assert_equal({contender: [answer["digest"] for answer in runs[0]] for contender, runs in checked.items()})
    found = _rows(_rounds(run_load, LOADERS, repeats, lambda _: (*given, False)))
    for contender, row in found.items():
        row["wire"] = sum(answer["wire"] for answer in checked[contender][0])
        row["memory"] = max(answer["memory"] for answer in checked[contender][0])
    columns = {**MEMORIES, "memory": "peak private memory, in shards", "wire": "MB through collectives"}
    return table(found, "load", columns)


def part_gather(megabytes: int, repeats: int, work: Path) -> str:
    given = (megabytes, str(work / "model"))
    checked = _rounds(run_gather, GATHERERS, 1, lambda _: (*given, True))
    _assert_equal({contender: runs[0][0]["digest"] for contender, runs in checked.items()})
    found = _rows(_rounds(run_gather, GATHERERS, repeats, lambda _: (*given, False)))
    for contender, row in found.items():
        row["first"], *others = (answer["memory"] for answer in checked[contender][0])
        row["others"] = max(others)
    columns = {**MEMORIES, "first": "rank 0's peak, in models", "others": "the other rank's"}
    return table(found, "gather to rank 0", columns)


def part_save(megabytes: int, repeats: int, work: Path) -> str:
    dests = {contender: str(work / f"saved-{number}") for number, contender in enumerate(SAVERS)}
    given = (megabytes, str(work / "model"))
    checked = _rounds(run_save, SAVERS, 1, lambda contender: (*given, dests[contender], True))
    _assert_equal({contender: _digest(iter(_whole_files(dest).items())) for contender, dest in dests.items()})
    found = _rows(_rounds(run_save, SAVERS, repeats, lambda contender: (*given, dests[contender], False)))
    for contender, row in found.items():
        row["first"] = checked[contender][0][0]["memory"]
        shutil.rmtree(dests[contender])
    return table(found, "save as Hugging Face files", {"seconds": "time", "first": "rank 0's extra memory, in models"})


def _rounds(measure: Callable[..., Any], contenders: dict[str, Any], repeats: int, given: Callable[[str], Any]) -> Runs:
    """Every contender in processes of its own, turn by turn, so that a slow minute is everybody's: the ranks' answers of
    each run, the first of which is of new processes."""
    runs: Runs = {contender: [] for contender in contenders}
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(RankPool(env=ENVIRONMENTS.get(name))) for name in contenders}
        for number in range(repeats):
            for contender in random.Random(number).sample(list(pools), len(pools)):
                pool, arguments = pools[contender], given(contender)
                if measure is run_save:
                    shutil.rmtree(arguments[2], ignore_errors=True)
                runs[contender].append(pool.run(measure, RANKS, contender, *arguments, timeout_s=600))
    return runs


def _rows(runs: Runs) -> Rows:
    """A row for each contender, with each time of the run whose slowest rank was the fastest."""
    return {
        contender: {key: min(max(answer[key] for answer in run) for run in found) for key in found[0][0]}
        for contender, found in runs.items()
    }


def part_convert(megabytes: int, repeats: int, work: Path) -> str:
    """From a torch file to a Hugging Face directory, beside copying the file; both end on the disk."""
    source = work / "model.pt"
    torch.save(_whole_files(str(work / "model")), source)
    contenders = {
        "`shardwise convert`, torch to Hugging Face": _convert,
        "copying the file": _copy,
        "copying the file, each block sent to the disk at once": _copy_blocks,
    }
    found: Rows = {name: {"seconds": math.inf} for name in contenders}
    digests = {}
    for number in range(repeats + 1):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            shutil.rmtree(work / "out", ignore_errors=True)
            os.sync()
            _settle_files([source])
            if number:
                start = time.perf_counter()
                contenders[name](source, work / "out")
                found[name]["seconds"] = min(found[name]["seconds"], time.perf_counter() - start)
            else:
                with Sampler() as sampler:
                    contenders[name](source, work / "out")
                found[name]["first"] = sampler.grown / 2**20
                copied = work / "out" / source.name
                whole = torch.load(copied, mmap=True) if copied.exists() else _whole_files(str(work / "out"))
                digests[name] = _digest(iter(whole.items()))
    _assert_equal(digests)
    source.unlink()
    shutil.rmtree(work / "out")
    return table(found, "convert", {"seconds": "time", "first": "memory, in MiB"})


def _convert(source: Path, dest: Path) -> None:
    from shardwise.state.convert import Conversion, convert

    convert(Conversion(source=source, dest=dest, to="hf"))


def _copy(source: Path, dest: Path) -> None:
    dest.mkdir()
    shutil.copyfile(source, dest / source.name)
    descriptor = os.open(dest / source.name, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _copy_blocks(source: Path, dest: Path) -> None:
    """The disk's own speed: nothing piles up in the page cache."""
    dest.mkdir()
    block, position = bytearray(8 << 20), 0
    with source.open("rb", buffering=0) as file, (dest / source.name).open("wb", buffering=0) as copy:
        while num := file.readinto(block):
            copy.write(memoryview(block)[:num])
            os.posix_fadvise(copy.fileno(), 0, position + num, os.POSIX_FADV_DONTNEED)
            position += num
        os.fsync(copy.fileno())


PARTS = {"load": part_load, "gather": part_gather, "save": part_save, "convert": part_convert}


def _assert_equal(digests: Mapping[str, Any]) -> None:
    (first, expected), *others = ((name, json.dumps(digest, sort_keys=True)) for name, digest in digests.items())
    for name, digest in others:
        assert digest == expected, f"{name} gives other values than {first}"


TIMES = {"seconds": "ours / theirs", "again": "ours / theirs, in use"}


def table(found: Rows, title: str, columns: dict[str, str]) -> str:
    """A row for each contender; times also as what ours takes of them."""
    own, times = next(iter(found.values())), [key for key in columns if key in TIMES]
    headings = [title, *columns.values(), *(TIMES[key] for key in times)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for contender, row in found.items():
        ratios = ["" if row is own else f"{own[key] / row[key]:.2f}" for key in times]
        lines.append(f"| {' | '.join([contender, *(_cell(key, row[key]) for key in columns), *ratios])} |")
    return "\n".join(lines)


def _cell(key: str, value: float) -> str:
    if key in TIMES:
        return f"{value:.2f} s"
    return f"{value / 1e6:.0f}" if key == "wire" else f"{value:.3f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2048, help="size of the model (2048)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"runs of each figure ({REPEATS})")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="one table only; may be repeated")
    parser.add_argument("--write", metavar="PAGE", help="put the tables into this page")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("accelerate") is None:
        print("accelerate is not installed (pip install shardwise[peers]): its row is left out", file=sys.stderr)
        LOADERS.pop("accelerate `fsdp2_load_full_state_dict`")
    tables = []
    with tempfile.TemporaryDirectory(prefix="shardwise-weights-") as folder:
        work = Path(folder)
        (work / "model").mkdir()
        torch.manual_seed(0)
        save_file(build(args.megabytes).state_dict(), work / "model" / "model.safetensors")
        for part in args.part or PARTS:
            tables.append(PARTS[part](args.megabytes, args.repeats, work))
            print(tables[-1], end="\n\n", flush=True)
    if args.write:
        _put(Path(args.write), "\n\n".join(tables))


def _put(page: Path, text: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- weights -->\n")
    _, _, after = rest.partition("<!-- /weights -->")
    page.write_text(f"{before}<!-- weights -->\n{text}\n<!-- /weights -->{after}", encoding="utf-8")


if __name__ == "__main__":
    # Ranks load functions by the name of their module, which a script that is running does not have.
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("weights").main()
