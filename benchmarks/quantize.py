"""Measures weights in 4 bits beside bitsandbytes, on one process: packing, unpacking, and loading a directory into packed layers.

    python benchmarks/quantize.py                            # prints a table; a minute on one core, needs bitsandbytes
    python benchmarks/quantize.py --write docs/quantize.md   # and puts it into the page

Before anything is timed the codes of all numbers are those of bitsandbytes, and the values that both make of one set of bytes are equal.
Times are in turns, on one thread; read the ratios.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.model import nf4

__all__ = ["measure_codes", "measure_load", "table"]


def measure_codes(size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Millions of numbers a second of a weight ``[size, size]``: ``packing`` and ``unpacking``, of Shardwise and of bitsandbytes."""
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
    numbers = size * size / 1e6
    return {
        what: tuple(numbers / seconds for seconds in _in_turns(calls, rounds))  # type: ignore[misc]
        for what, calls in (("packing", (pack, pack_theirs)), ("unpacking", (unpack, unpack_theirs)))
    }


def _in_turns(calls: tuple[Callable[[], Any], ...], rounds: int) -> list[float]:
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call in zip(found, calls, strict=True):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
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


def measure_load(number: int, size: int) -> float:
    """Seconds of ``load_weights`` of a bfloat16 file into packed layers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, sw.init("dp_shard=1", device="cpu") as world:
        path = Path(folder) / "model.safetensors"
        save_file({f"layers.{i}.weight": (torch.randn(size, size) * 0.02).bfloat16() for i in range(number)}, str(path))
        model = sw.parallelize(
            lambda: _Stack(number, size), world, init="load", lora=sw.LoRA(rank=1), quantize="nf4", precision="bf16"
        )
        begin = time.perf_counter()
        sw.load_weights(model, path)
        return time.perf_counter() - begin


def table(codes: dict[str, tuple[float, float]], load: float, number: int, size: int) -> str:
    """What was measured, as a table."""
    lines = ["| on one core | Shardwise | bitsandbytes | ratio |", "|---|--:|--:|--:|"]
    lines += [
        f"| {what}, million numbers a second | {ours:.0f} | {theirs:.0f} | {ours / theirs:.1f} |"
        for what, (ours, theirs) in codes.items()
    ]
    loaded = number * size * size / 1e6 / load
    lines.append(
        f"| `load_weights` of {number} x [{size:,}, {size:,}] in bf16, million numbers a second | {loaded:.0f} | | |"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and inputs of a weight (4096)")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each contender (7)")
    parser.add_argument("--write", type=Path, help="a page whose <!-- quantize --> part is replaced by the table")
    args = parser.parse_args(argv)
    text = table(measure_codes(args.size, args.rounds), measure_load(6, args.size), 6, args.size)
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition("<!-- quantize -->\n")
        after = rest.partition("<!-- /quantize -->")[2]
        args.write.write_text(f"{before}<!-- quantize -->\n{text}\n<!-- /quantize -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
