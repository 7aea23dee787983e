"""Measures activation checkpointing: `remat="full"` beside torch's own `checkpoint` around each block, on one CPU process.

    python benchmarks/remat.py                              # prints a table; a minute
    python benchmarks/remat.py --write docs/benchmarks.md   # and puts it into the page

24 blocks (a norm and two linear layers), forward and backward, turn by turn in one process. Before anything is timed, the
gradients of all sides are equal bit by bit, and each block has run so often that its runs are compared rarely.
"""

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw

__all__ = ["WIDTHS", "measure", "table"]

WIDTHS = (64, 256)
REFERENCE, PLAIN, OURS = "`torch.utils.checkpoint`", "without", '`remat="full"`'
WARM = 20  # passes


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, each under torch's checkpoint where ``is_checkpointed``."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def _passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def measure(rounds: int, width: int, depth: int = 24) -> dict[str, list[float]]:
    """Side -> seconds of a forward and a backward, for each round."""
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {REFERENCE: Model(width, depth)}
    models[REFERENCE].is_checkpointed = True  # type: ignore[assignment]
    models[PLAIN], given = (copy.deepcopy(models[REFERENCE]) for _ in range(2))
    models[PLAIN].is_checkpointed = given.is_checkpointed = False  # type: ignore[assignment]
    x = torch.randn(8, 16, width)
    seconds: dict[str, list[float]] = {name: [] for name in (REFERENCE, OURS, PLAIN)}
    with sw.init("dp_shard=1", device="cpu") as world:
        models[OURS] = sw.parallelize(given, world, remat="full")
        wanted = _passes(models[PLAIN], x)
        for name, model in models.items():
            assert all(map(torch.equal, _passes(model, x), wanted)), f"{name}: other gradients"
            for _ in range(WARM):
                _passes(model, x)
        for _ in range(rounds):
            for name in seconds:
                start = time.perf_counter()
                _passes(models[name], x)
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(found: dict[int, dict[str, list[float]]]) -> str:
    """A Markdown table: medians over the rounds, also as a ratio to torch's checkpoint."""
    lines = ["| 24 blocks | forward and backward | median, ms | middle half, ms | ratio |", "|---|---|--:|--:|--:|"]
    for width, seconds in found.items():
        reference = statistics.median(seconds[REFERENCE])
        for name, of_name in seconds.items():
            low, middle, high = (1000 * value for value in statistics.quantiles(of_name, n=4))
            lines.append(
                f"| d={width} | {name} | {middle:.1f} | {low:.1f}-{high:.1f} | {middle / 1000 / reference:.2f} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="timed passes of each side (60)")
    parser.add_argument("--write", type=Path, help="a page whose <!-- remat --> part is replaced by the table")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds={args.rounds}: a median and a spread need at least 2")
    torch.set_num_threads(1)
    text = table({width: measure(args.rounds, width) for width in WIDTHS})
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition("<!-- remat -->\n")
        after = rest.partition("<!-- /remat -->")[2]
        args.write.write_text(f"{before}<!-- remat -->\n{text}\n<!-- /remat -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
