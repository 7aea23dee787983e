"""Measures weights in 4 bits beside bitsandbytes (and torchao, where it is installed), on one process: packing, unpacking, and loading a
directory into packed layers; and what fine-tuning takes of memory on two ranks.

    python benchmarks/quantize.py                            # prints a table; a minute on one core, needs bitsandbytes
    python benchmarks/quantize.py --write docs/quantize.md   # and puts it into the page
    python benchmarks/quantize.py --memory 160               # and fine-tunes 160 layers of [4096, 4096], 5 GiB in bf16, on two ranks

Before anything is timed the codes of all numbers are those of bitsandbytes, and the values that both make of one set of bytes are equal.
Times are in turns, of the processor, on one thread; read the ratios. Unpacking is timed twice: of a weight whose values are new memory, as
in training, and of one whose values are where those of the call before were. Its *operators* are those of one chunk alone, which stays in the
core's cache: what an unpacking without a kernel of its own takes at least.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.launch import launch_local
from shardwise.model import nf4

__all__ = ["measure_codes", "measure_difference", "measure_load", "measure_memory", "measure_others", "table"]


def measure_codes(size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Millions of numbers a second of a weight ``[size, size]``: ``packing``, ``unpacking`` and its ``operators``, of Shardwise
    and of bitsandbytes."""
    import bitsandbytes.functional as theirs

    torch.set_num_threads(1)
    weight = (torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    packing = nf4.Packing.of((size, size))
    codes, state = theirs.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    ours = nf4.pack(weight)
    assert torch.equal(ours[0].view(-1), codes.view(-1)), "other codes than bitsandbytes"
    parts = codes.view(size, -1), state.absmax.view(size, -1), state.state2.absmax, state.offset
    values = nf4.unpack(*parts, packing, torch.bfloat16)
    assert torch.equal(values, theirs.dequantize_4bit(codes, state)), "other values of the same bytes"
    pack = lambda: nf4.pack(weight)  # noqa: E731
    pack_theirs = lambda: theirs.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")  # noqa: E731
    unpack = lambda: nf4.unpack(*ours, packing, torch.bfloat16)  # noqa: E731
    unpack_theirs = lambda: theirs.dequantize_4bit(codes, state)  # noqa: E731
    run_operators = functools.partial(_operators, codes.flatten(), min(1 << 15, codes.numel()))
    numbers = size * size / 1e6
    contenders = {
        "packing": (pack, pack_theirs),
        "unpacking": (unpack, unpack_theirs),
        "operators": (run_operators, unpack_theirs),
    }
    return {
        what: tuple(numbers / seconds for seconds in _in_turns(calls, rounds))  # type: ignore[misc]
        for what, calls in contenders.items()
    }


def _operators(codes: Tensor, part: int) -> None:
    """The operators of an unpacking of as many bytes, ``part`` of them at a time, into one place."""
    pairs, index = torch.zeros(256, dtype=torch.int64), torch.empty(part, dtype=torch.int32)
    both, scales = torch.empty(part, dtype=torch.int64), torch.ones(part // 32, 1)
    values, out = both.view(torch.float32).view(-1, nf4.BLOCK), torch.empty(part // 32, nf4.BLOCK, dtype=torch.bfloat16)
    for _ in range(codes.numel() // part):
        torch.index_select(pairs, 0, index.copy_(codes[:part]), out=both)
        out.copy_(values.mul_(scales))


def _in_turns(calls: tuple[Callable[[], Any], ...], rounds: int) -> list[float]:
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call in zip(found, calls, strict=True):
            begin = time.thread_time()
            call()
            times.append(time.thread_time() - begin)
    return [statistics.median(times) for times in found]


class _Stack(nn.Module):
    """Linear layers alone."""

    def __init__(self, number: int, size: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def write_stack(folder: str, number: int, size: int) -> int:
    """Writes a directory of linear layers in bfloat16, each into a file of its own. Returns its bytes."""
    names, place = {}, Path(folder)
    values = (torch.randn(size, size, generator=torch.Generator().manual_seed(0)) / size**0.5).bfloat16()
    for i in range(number):
        names[f"layers.{i}.weight"] = f"model-{i:05}.safetensors"
        save_file({f"layers.{i}.weight": values.roll(i)}, place / names[f"layers.{i}.weight"])
    index = {"metadata": {"total_size": 2 * number * size * size}, "weight_map": names}
    (place / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum(path.stat().st_size for path in place.glob("*.safetensors"))


def _stack(world: sw.World, number: int, size: int) -> nn.Module:
    return sw.parallelize(
        functools.partial(_Stack, number, size),
        world,
        init="load",
        lora=sw.LoRA(rank=1),
        quantize="nf4",
        precision="bf16",
        example={"x": torch.zeros(1, size)},
    )


def measure_load(folder: str, number: int, size: int) -> tuple[float, int]:
    """Seconds of the processor of ``load_weights`` of such a directory into packed layers, and how many bytes this takes at most beside them."""
    torch.set_num_threads(1)
    with sw.init("dp_shard=1", device="cpu") as world:
        with tempfile.TemporaryDirectory() as small:  # what is allocated once
            write_stack(small, 1, 128)
            sw.load_weights(_stack(world, 1, 128), small)
        model = _stack(world, number, size)
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        begin = time.process_time()
        sw.load_weights(model, folder)
        seconds = time.process_time() - begin
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        return seconds, _memory("VmHWM") - before - held


def measure_others(folder: str, number: int) -> dict[str, float]:
    """Seconds of the processor in which others read the same directory, a tensor at a time, and pack it: by name."""
    import bitsandbytes.functional as theirs

    torch.set_num_threads(1)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "bitsandbytes": lambda w: theirs.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    }
    with contextlib.suppress(ImportError):
        from torchao.quantization import NF4Tensor  # pyrefly: ignore

        calls["torchao"] = lambda w: NF4Tensor.from_tensor(w, 64, 256)
    found = {}
    for name, call in calls.items():
        begin = time.process_time()
        kept = [
            call(load_file(path)[f"layers.{i}.weight"])
            for i, path in enumerate(sorted(Path(folder).glob("*.safetensors")))
        ]
        found[name] = time.process_time() - begin
        assert len(kept) == number
    return found


def measure_memory(folder: str, number: int, size: int, steps: int = 2) -> tuple[int, list[float]]:
    """The largest resident memory of this rank, its Python and torch with it, and the losses: loads a directory and trains adapters."""
    torch.set_num_threads(1)
    with sw.init("dp_shard=-1", device="cpu") as world:
        model = _stack(world, number, size)
        sw.load_weights(model, folder)
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        step = sw.TrainStep(model, optim, loss=lambda y, batch: y.square().sum(), count=lambda batch: 4 * size)
        batch = {"x": torch.randn(4, size, generator=torch.Generator().manual_seed(world.rank))}
        losses = [step([batch]).loss for _ in range(steps)]
        return _memory("VmHWM"), losses


def _memory(what: str) -> int:
    """Of this process, in bytes: ``VmRSS``, or ``VmHWM``, its peak."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(text.partition(f"{what}:")[2].split()[0])


def measure_difference(size: int = 1024) -> dict[str, tuple[float, float]]:
    """Whose values are others than ours -> their share, and the largest relative difference."""
    import bitsandbytes.functional as theirs

    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.02
    ours = nf4.unpack(*nf4.pack(weight), nf4.Packing.of((size, size)), torch.float32)
    packed = theirs.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
    found = {"bitsandbytes, `bnb_4bit_use_double_quant=False`": _apart(theirs.dequantize_4bit(*packed), ours)}
    with contextlib.suppress(ImportError):
        from torchao.quantization import NF4Tensor  # pyrefly: ignore

        low = weight.bfloat16()
        ours = nf4.unpack(*nf4.pack(low), nf4.Packing.of((size, size)), torch.bfloat16)
        found["torchao, as in torchtune, of bfloat16"] = _apart(
            NF4Tensor.from_tensor(low, 64, 256).get_original_weight(), ours
        )
    return found


def _apart(values: Tensor, ours: Tensor) -> tuple[float, float]:
    apart, ours = (values.float() - ours.float()).abs(), ours.float().abs()
    return float((apart > 0).float().mean()), float((apart / ours.clamp(min=1e-30))[ours > 0].max())


def table(
    codes: dict[str, tuple[float, float]],
    again: dict[str, tuple[float, float]],
    seconds: float,
    others: dict[str, float],
    extra: float,
    number: int,
    size: int,
) -> str:
    """What was measured, as a table. ``again``: of values that are where those of the call before were."""
    lines = ["| on one core | Shardwise | bitsandbytes | ratio |", "|---|--:|--:|--:|"]
    rates = {
        "packing, million numbers a second": codes["packing"],
        "unpacking into new memory": codes["unpacking"],
        "unpacking into memory that is there": again["unpacking"],
        "its operators alone, on one chunk in cache": again["operators"],
    }
    lines += [
        f"| {what} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2g} |" for what, (ours, theirs) in rates.items()
    ]
    of_others = {name: number * size * size / 1e6 / each for name, each in others.items()}
    ours = number * size * size / 1e6 / seconds
    lines.append(
        f"| reading {number} x [{size:,}, {size:,}] in bf16 and packing it, million numbers a second | {ours:.0f} | "
        f"{of_others['bitsandbytes']:.0f} | {ours / of_others['bitsandbytes']:.1f} |"
    )
    if "torchao" in of_others:
        lines.append(f"| the same beside torchao: {of_others['torchao']:.0f} | | | {ours / of_others['torchao']:.1f} |")
    lines.append(
        f"| memory for reading and packing one [{2 * size:,}, {2 * size:,}], beside what is packed: a part of its bytes in bf16 | {extra:.2f} | | |"
    )
    lines += [
        f"| values that are others by {whose} | {share:.0%}, by up to {largest:.2%} | | |"
        for whose, (share, largest) in measure_difference().items()
    ]
    return "\n".join(lines)


def memory_text(number: int, size: int) -> str:
    """Fine-tunes a directory on two ranks, and says what they took."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # else glibc keeps what is freed: the gathered bytes of all units
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_stack(folder, number, size)
        found = launch_local(f"{Path(__file__).resolve()}:measure_memory", nproc=2, args=(folder, number, size))
    peak, losses = max(peak for peak, _ in found), found[0][1]
    return (
        f"a directory of {num_bytes / 2**20:,.0f} MiB in bf16, fine-tuned in 4 bits on 2 ranks: at most {peak / 2**20:,.0f} MiB of resident "
        f"memory each, Python and torch with it, {num_bytes / peak:.1f} times less; losses {', '.join(f'{loss:.4g}' for loss in losses)}"
    )


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and inputs of a weight (4096)")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each contender (7)")
    parser.add_argument("--memory", type=int, default=0, metavar="N", help="also fine-tune N layers on two ranks (0)")
    parser.add_argument("--write", type=Path, help="a page whose <!-- quantize --> part is replaced by the table")
    args = parser.parse_args(argv)
    here, number = str(Path(__file__).resolve()), 6
    codes, again = (
        launch_local(f"{here}:measure_codes", nproc=1, args=(size, args.rounds))[0]
        for size in (args.size, args.size // 2)
    )
    with tempfile.TemporaryDirectory() as folder:
        write_stack(folder, number, args.size)
        seconds, _ = launch_local(f"{here}:measure_load", nproc=1, args=(folder, number, args.size))[0]
        others = launch_local(f"{here}:measure_others", nproc=1, args=(folder, number))[0]
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_stack(folder, 1, 2 * args.size)
        _, extra = launch_local(f"{here}:measure_load", nproc=1, args=(folder, 1, 2 * args.size))[0]
    text = table(codes, again, seconds, others, extra / num_bytes, number, args.size)
    print(text)
    if args.memory:
        text += f"\n\n{memory_text(args.memory, args.size)}"
        print(text.splitlines()[-1])
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition("<!-- quantize -->\n")
        after = rest.partition("<!-- /quantize -->")[2]
        args.write.write_text(f"{before}<!-- quantize -->\n{text}\n<!-- /quantize -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
