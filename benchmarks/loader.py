"""Measures `sw.Loader` with worker processes beside torch's DataLoader, on samples that take time to read.

    python benchmarks/loader.py                              # prints a table; a minute
    python benchmarks/loader.py --write docs/benchmarks.md   # and puts it into the page

Windows of 16 samples of 10 ms each in micro-batches of 4, of which a training step of 20 ms is made. Both give each sample
once before they are timed. An epoch is timed with the start of its workers, turn by turn.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import shardwise as sw

__all__ = ["CONTENDERS", "measure", "table"]

SAMPLES, WINDOW, MICRO = 160, 16, 4
Epoch = Callable[[sw.World, "Slow"], Iterator[list[Any]]]


class Slow(Dataset[Any]):
    """Samples that take ``seconds`` each to read."""

    def __init__(self, num: int, seconds: float):
        self.num, self.seconds = num, seconds

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return {"input": torch.full((64,), float(index)), "labels": torch.tensor(index)}


def _loader(**options: Any) -> Epoch:
    def epoch(world: sw.World, data: Slow) -> Iterator[list[Any]]:
        yield from sw.Loader(data, world, global_batch=WINDOW, micro_batch=MICRO, **options)

    return epoch


def _torchs(num_workers: int) -> Epoch:
    def epoch(_world: sw.World, data: Slow) -> Iterator[list[Any]]:
        batches = iter(DataLoader(data, batch_size=MICRO, shuffle=True, num_workers=num_workers))
        while window := list(itertools.islice(batches, WINDOW // MICRO)):
            yield window

    return epoch


REFERENCE = "torch's `DataLoader(num_workers=2)`"
CONTENDERS: dict[str, Epoch] = {
    REFERENCE: _torchs(2),
    "`sw.Loader(num_workers=2)`": _loader(num_workers=2),
    "`sw.Loader()`": _loader(),
}


def _check(windows: Iterable[list[Any]], num: int) -> None:
    seen = sorted(i for window in windows for batch in window for i in batch["labels"].tolist())
    assert seen == list(range(num)), "a sample is missing, or was seen twice"


def measure(rounds: int, num: int = SAMPLES, seconds: float = 0.01) -> dict[str, list[float]]:
    """Contender -> seconds of an epoch of ``num`` samples, for each round."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with sw.init("dp_shard=1", device="cpu") as world:
        for epoch in CONTENDERS.values():
            _check(epoch(world, Slow(num, 0.0)), num)
        for _ in range(rounds):
            for name, epoch in CONTENDERS.items():
                start = time.perf_counter()
                for _window in epoch(world, Slow(num, seconds)):
                    time.sleep(2 * seconds)
                found[name].append(time.perf_counter() - start)
    return found


def table(found: dict[str, list[float]]) -> str:
    """A Markdown table: medians over the rounds, also as a ratio to torch's."""
    lines = ["| an epoch | median, s | middle half, s | ratio |", "|---|--:|--:|--:|"]
    reference = statistics.median(found[REFERENCE])
    for name, seconds in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        lines.append(f"| {name} | {middle:.2f} | {low:.2f}-{high:.2f} | {middle / reference:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed epochs of each contender (7)")
    parser.add_argument("--write", type=Path, help="a page whose <!-- loader --> part is replaced by the table")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds={args.rounds}: a median and a spread need at least 2")
    text = table(measure(args.rounds))
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition("<!-- loader -->\n")
        after = rest.partition("<!-- /loader -->")[2]
        args.write.write_text(f"{before}<!-- loader -->\n{text}\n<!-- /loader -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
