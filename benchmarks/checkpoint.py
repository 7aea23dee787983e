"""Measures saving and resuming on local processes, compared with torch's distributed checkpoint (DCP).

    python benchmarks/checkpoint.py                               # prints the tables; some minutes, a few GB of disk
    python benchmarks/checkpoint.py --write docs/benchmarks.md    # and puts them into the page
    python benchmarks/checkpoint.py --megabytes 64                # of a small model

Two ranks (gloo) hold a model and its AdamW state: three times the model. Contenders come in a random order in each round and
save four times; each figure is the least of all saves but the first of a round. What training waits, of a copy, and what
checksums cost are medians of ratios taken in turns. The disk's own speed is that of the same bytes, written by both ranks
directly from aligned memory, synced. Everything is on disk when a save ends: DCP syncs its files too. Processor time is that
of all ranks, their threads included. Before a table is printed, what was saved is loaded by whoever saved it into a fresh
model and optimizer, and every shard is equal to the last bit.
"""

import argparse
import ctypes
import gc
import importlib
import math
import mmap
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.recipe import extents
from shardwise.state.checkpoint import restore
from shardwise.state.integrity import reading
from shardwise.testing import RankPool

__all__ = ["build", "main"]

RANKS = 2
ROUNDS = 2
SAVES = 3  # in a round, by each contender, after one that is not measured


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


class Stack(nn.Module):
    """Blocks of some size: nothing is computed here, only moved."""

    def __init__(self, megabytes: int):
        super().__init__()
        dim = 2048 if megabytes >= 1024 else 1024 if megabytes >= 256 else 128
        count = max(2, round(megabytes * 2**20 / (8 * dim * dim * 4)))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(count))
        self.head = nn.Linear(dim, 1001, bias=False)  # an odd number of rows: the ranks' shards are not alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(megabytes: int) -> nn.Module:
    return Stack(megabytes)


class Step:
    """What a manager asks of a step; here nothing is trained."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer):
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass

    check_state_dict = load_state_dict


def make(world: sw.World, megabytes: int, *, steps: int) -> Step:
    """A run whose optimizer has made so many steps."""
    model = sw.parallelize(lambda: build(megabytes), world, sharding=sw.Sharding(min_unit_bytes=0))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(steps):
        for place, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 + number + place)
        optim.step()
    optim.zero_grad()
    return Step(model, optim)


def digest(step: Step) -> list[int]:
    """A sum over the bits of every shard, of the model and of its optimizer."""
    found = []
    for param in step.model.parameters():
        for tensor in (param, *(value for _, value in sorted(step.optim.state[param].items()))):
            local = tensor.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            found.append(int(local.reshape(-1).view(torch.int32).sum(dtype=torch.int64)))
    return found


def state_bytes(step: Step) -> int:
    """Of all ranks."""
    params = runtime_of(step.model).recipe.params.values()
    return 3 * sum(4 * torch.Size(param.shape).numel() for param in params)


# ---- contenders ---------------------------------------------------------------------------------------------------------


class Ours:
    def __init__(self, step: Step, folder: Path, *, background: bool):
        self.step, self.folder = step, folder
        self.manager = sw.CheckpointManager(folder, step, keep=None, async_save=background)

    def begin(self) -> None:
        """As if the run had gone on: another step, and none of the older ones."""
        runtime = runtime_of(self.step.model)
        runtime.step += 1
        if runtime.world.is_main:
            for older in self.folder.glob("step-*"):
                shutil.rmtree(older)

    def save(self) -> None:
        self.manager.save()

    def wait(self) -> None:
        self.manager.wait()

    def load(self, step: Step) -> None:
        restore.restore(self.folder / "latest", step.model, step.optim, {})

    def close(self) -> None:
        self.manager.close()


class Dcp:
    def __init__(self, step: Step, folder: Path, *, background: bool):
        self.step, self.folder, self.background = step, folder, background
        self.group = dist.new_group(backend="gloo") if background else None
        self.future: Any = None

    def begin(self) -> None:
        if runtime_of(self.step.model).world.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.step.model, self.step.optim)
        state = {"model": model, "optim": optim}
        if self.background:
            self.future = dcp.async_save(state, checkpoint_id=self.folder, process_group=self.group)
        else:
            dcp.save(state, checkpoint_id=self.folder)

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()

    def load(self, step: Step) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optim = get_state_dict(step.model, step.optim)  # fills what a fresh optimizer has not
        state = {"model": model, "optim": optim}
        dcp.load(state, checkpoint_id=self.folder)
        set_state_dict(step.model, step.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def close(self) -> None:
        pass


CONTENDERS: dict[str, tuple[type, bool]] = {
    "Shardwise": (Ours, False),
    "torch DCP": (Dcp, False),
    "Shardwise, in the background": (Ours, True),
    "torch DCP, `async_save`": (Dcp, True),
}


# ---- measuring ----------------------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """Of this process, its threads included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def saves(contender: str, megabytes: int, folder: str, rounds: int, loads: bool) -> dict[str, Any]:
    """Of one rank: seconds of each save whole, seconds until it returned, and processor seconds; and with ``loads`` of a load,
    whose result is compared."""
    kind, background = CONTENDERS[contender]
    place = Path(folder)
    with sw.init("dp_shard=-1", device="cpu") as world:
        step = make(world, megabytes, steps=1)
        saver = kind(step, place, background=background)
        found: dict[str, Any] = {"whole": [], "stall": [], "cpu": []}
        for _ in range(rounds):
            saver.begin()
            if world.is_main:
                os.sync()
            world.barrier()
            start, used = time.perf_counter(), cpu_seconds()
            saver.save()
            found["stall"].append(time.perf_counter() - start)
            saver.wait()
            found["cpu"].append(cpu_seconds() - used)
            dist.barrier()
            found["whole"].append(time.perf_counter() - start)
        if loads:
            fresh = make(world, megabytes, steps=0)
            start = time.perf_counter()
            saver.load(fresh)
            dist.barrier()
            found["load"] = time.perf_counter() - start
            assert digest(fresh) == digest(step), f"{contender}: what was loaded is not what was saved"
        saver.close()
        found["bytes"] = state_bytes(step)
        return found


def written(num_bytes: int, folder: str, rounds: int) -> float:
    """Seconds in which the ranks write so many bytes, a file each, past the page cache; the least."""
    chunk = 8 << 20
    memory = memoryview(mmap.mmap(-1, chunk))
    memory[:] = os.urandom(chunk)
    with sw.init("dp_shard=-1", device="cpu") as world:
        found = []
        for _ in range(rounds):
            path = Path(folder) / f"raw-{world.rank}"
            dist.barrier()
            start = time.perf_counter()
            descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT)
            os.posix_fallocate(descriptor, 0, num_bytes // world.size)
            for offset in range(0, num_bytes // world.size // chunk * chunk, chunk):
                os.pwrite(descriptor, memory, offset)
            os.fsync(descriptor)
            dist.barrier()
            found.append(time.perf_counter() - start)
            os.close(descriptor)
            path.unlink()
        return min(found)


def stalls(megabytes: int, folder: str, rounds: int) -> list[tuple[float, float]]:
    """Of each round, seconds that a save in the background keeps training, and seconds of a copy of the same state to other
    memory in use: one after the other in one process, since how fast memory is depends on which pages it got."""
    with sw.init("dp_shard=-1", device="cpu") as world:
        step = make(world, megabytes, steps=1)
        saver = Ours(step, Path(folder), background=True)
        mine = [p.to_local() for p in step.model.parameters()]  # type: ignore[attr-defined]
        mine += [v.to_local() for p in step.model.parameters() for v in step.optim.state[p].values() if v.dim()]
        others = [tensor.detach().clone() for tensor in mine]
        found = []
        for _ in range(rounds + 1):
            saver.begin()
            dist.barrier()
            start = time.perf_counter()
            saver.save()
            dist.barrier()
            stalled = time.perf_counter() - start
            saver.wait()
            dist.barrier()
            start = time.perf_counter()
            for other, tensor in zip(others, mine, strict=True):
                other.copy_(tensor.detach())
            dist.barrier()
            found.append((stalled, time.perf_counter() - start))
        saver.close()
        return found[1:]  # of the first save, the copies' memory is new


def resharded(megabytes: int, folder: str) -> tuple[int, int]:
    """Of one rank of twice as many: bytes read, and bytes needed."""
    with sw.init("dp_shard=-1", device="cpu") as world:
        step = make(world, megabytes, steps=0)
        done = restore.restore(Path(folder) / "latest", step.model, step.optim, {})
        runtime = runtime_of(step.model)
        pieces = (extents(param, runtime.view.coord) for param in runtime.recipe.params.values())
        return done.num_bytes, 3 * 4 * sum(torch.Size(piece.sizes).numel() for found in pieces for piece in found)


def verified(megabytes: int, folder: str, rounds: int) -> list[tuple[float, float]]:
    """Of each round, seconds of a resume as it is, and with blocks that are read and not compared: in turns, either first."""
    real = reading.sum_of
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with sw.init("dp_shard=-1", device="cpu") as world:
        step = make(world, megabytes, steps=1)
        for number in range(1 + 2 * rounds):
            compares = number % 4 in (0, 1)
            reading.sum_of = real if compares else _Believed  # type: ignore[assignment]
            _be_fresh(step, 3 * sum(param.numel() * 4 for param in step.model.parameters()) // world.size)
            dist.barrier()
            start = time.perf_counter()
            restore.restore(Path(folder) / "latest", step.model, step.optim, {})
            dist.barrier()
            if number:  # the first one reads from the disk; those that count, from memory
                seconds[compares].append(time.perf_counter() - start)
        reading.sum_of = real
        del world
    return list(zip(seconds[True], seconds[False], strict=True))


def _be_fresh(step: Step, num_bytes: int) -> None:
    """As a run that has just begun, whose optimizer has no state yet; and as much memory as will be needed is written to and given
    back, so that it costs every turn the same: what the host has taken away comes back at many times the price."""
    step.optim.state.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    torch.ones(num_bytes, dtype=torch.uint8)


class _Believed(int):
    """Equal to any sum."""

    def __new__(cls, _: Any) -> "_Believed":
        return super().__new__(cls, 0)

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


# ---- tables -------------------------------------------------------------------------------------------------------------


def table(megabytes: int, rounds: int, work: Path) -> str:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with RankPool() as pool:
        for number in range(rounds):
            for name in random.Random(number).sample(list(CONTENDERS), len(CONTENDERS)):
                folder = str(work / f"{list(CONTENDERS).index(name)}")
                runs = pool.run(saves, RANKS, name, megabytes, folder, 1 + SAVES, number == 0, timeout_s=600)
                found[name] += [
                    {
                        "whole": max(run["whole"][save] for run in runs),
                        "stall": max(run["stall"][save] for run in runs),
                        "cpu": sum(run["cpu"][save] for run in runs),
                        "load": max(run.get("load", math.inf) for run in runs),
                        "bytes": runs[0]["bytes"],
                    }
                    for save in range(1, 1 + SAVES)  # not the first: memory that is used again has been made
                ]
        size = found["Shardwise"][0]["bytes"]
        alone = max(pool.run(written, RANKS, size, str(work), rounds, timeout_s=600))
        pairs = pool.run(stalls, RANKS, megabytes, str(work / "2"), 2 * rounds + 1, timeout_s=600)[0]
        read = pool.run(resharded, 2 * RANKS, megabytes, str(work / "0"), timeout_s=600)
        restores = pool.run(verified, RANKS, megabytes, str(work / "0"), 2 * rounds + 1, timeout_s=600)[0]
    copied = statistics.median(copy for _, copy in pairs)
    without = statistics.median(bare for _, bare in restores)
    least = {name: {key: min(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}
    lines = [
        f"| save of {size / 1e9:.2f} GB | GB/s | training waits | processor s / GB | load |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {size / row['whole'] / 1e9:.2f} | {row['stall']:.2f} s | {row['cpu'] / size * 1e9:.2f} | {row['load']:.2f} s |"
            for name, row in least.items()
        ),
        "",
        "| | |",
        "|---|---|",
        f"| speed of a save, of the disk's own ({size / alone / 1e9:.2f} GB/s) | {alone / least['Shardwise']['whole']:.2f} |",
        f"| speed of a save, of DCP's | {least['torch DCP']['whole'] / least['Shardwise']['whole']:.2f} |",
        f"| what training waits for a save in the background, of a copy from memory to memory ({copied:.2f} s) | "
        f"{statistics.median(stalled / copy for stalled, copy in pairs):.2f} |",
        f"| bytes read by {2 * RANKS} ranks of what {RANKS} saved, of those needed | "
        f"{sum(done for done, _ in read) / sum(needed for _, needed in read):.3f} |",
        f"| time of a restore with checksums, of one without ({without:.2f} s) | {statistics.median(summed / bare for summed, bare in restores):.2f} |",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--megabytes", type=int, default=1400, help="size of the model (1400: 4.4 GB with its optimizer)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds ({ROUNDS})")
    parser.add_argument("--write", metavar="PAGE", help="put the tables into this page")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shardwise-checkpoint-") as folder:
        text = table(args.megabytes, args.rounds, Path(folder))
    print(text)
    if args.write:
        page = Path(args.write)
        before, _, rest = page.read_text(encoding="utf-8").partition("<!-- checkpoint -->\n")
        _, _, after = rest.partition("<!-- /checkpoint -->")
        page.write_text(f"{before}<!-- checkpoint -->\n{text}\n<!-- /checkpoint -->{after}", encoding="utf-8")


if __name__ == "__main__":
    # Ranks load functions by the name of their module, which a script that is running does not have.
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("checkpoint").main()
