"""Measures the cross entropy that holds no logits beside the plain one and torch's ``linear_cross_entropy``, on the CPU.

    python benchmarks/linear_loss.py                              # prints a table; some minutes
    python benchmarks/linear_loss.py --write docs/loss.md     # and puts it into the page

2048 positions of width 1024 and a vocabulary of 32000 in float32: forward and backward, turn by turn in one process. Before
anything is timed, loss and gradients of each side in float64 equal those of the plain one to 1e-12, on fewer positions.
Memory is what a profiler sees as the most that is allocated at once, less the gradients of inputs and weight, in parts of
one tensor of logits.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import shardwise as sw

__all__ = ["CONTENDERS", "measure", "table"]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")


def torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.linear_cross_entropy(hidden, weight, labels, reduction="sum")  # type: ignore[attr-defined]


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain: logits, then `F.cross_entropy`": plain,
    **({"torch, `F.linear_cross_entropy`": torchs} if hasattr(functional, "linear_cross_entropy") else {}),
    "`sw.linear_cross_entropy`": sw.linear_cross_entropy,
    "`sw.linear_cross_entropy(chunk_size=512)`": partial(sw.linear_cross_entropy, chunk_size=512),
}
REFERENCE = next(iter(CONTENDERS))


def _inputs(positions: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype) / width**0.5
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (positions,), generator=generator)


def _check(width: int, vocab: int) -> None:
    """Raises AssertionError if loss or gradients of a contender differ from the plain ones in float64."""
    found = {}
    for name, loss in CONTENDERS.items():
        hidden, weight, labels = _inputs(40, width, vocab, torch.float64)
        total = loss(hidden, weight, labels)
        total.backward()
        found[name] = (total.detach(), hidden.grad, weight.grad)
    for name, results in found.items():
        for mine, want in zip(results, found[REFERENCE], strict=True):
            off = (mine - want).abs().max() / want.abs().max()
            assert off <= 1e-12, f"{name} is off by {off:.1e}"


def _peak(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at once while ``run`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measure(
    rounds: int, positions: int = 2048, width: int = 1024, vocab: int = 32000
) -> dict[str, tuple[list[float], float]]:
    """Contender -> seconds of each round, and its memory in parts of the logits."""
    _check(width // 8, vocab // 8)
    hidden, weight, labels = _inputs(positions, width, vocab, torch.float32)

    def run(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, labels).backward()

    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        for name, loss in CONTENDERS.items():
            start = time.perf_counter()
            run(loss)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    gradients = 4 * (hidden.numel() + weight.numel())
    logits = 4 * positions * vocab
    memory = {}
    for name, loss in CONTENDERS.items():
        hidden.grad = weight.grad = None  # before the profiler counts what is freed
        memory[name] = (_peak(partial(run, loss)) - gradients) / logits
    return {name: (seconds[name], memory[name]) for name in CONTENDERS}


def table(found: dict[str, tuple[list[float], float]]) -> str:
    """A Markdown table: medians over the rounds, also as a ratio to the plain loss, and memory."""
    lines = [
        "| forward and backward | median, s | middle half, s | ratio | memory beside the gradients, in logits |",
        "|---|--:|--:|--:|--:|",
    ]
    middle_of = {name: statistics.median(seconds) for name, (seconds, _) in found.items()}
    for name, (seconds, memory) in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        lines.append(
            f"| {name} | {middle:.2f} | {low:.2f}-{high:.2f} | {middle / middle_of[REFERENCE]:.2f} | {memory:.2f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each contender (9)")
    parser.add_argument("--write", type=Path, help="a page whose <!-- linear loss --> part is replaced by the table")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds={args.rounds}: a median and a spread need at least 2")
    torch.set_num_threads(2)
    text = table(measure(args.rounds))
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition("<!-- linear loss -->\n")
        after = rest.partition("<!-- /linear loss -->")[2]
        text = f"{before}<!-- linear loss -->\n{text}\n<!-- /linear loss -->{after}"
        args.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
