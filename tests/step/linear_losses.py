"""Cross entropies of a linear layer with all options, beside torch's."""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.step import linear_loss


class Case(NamedTuple):
    vocab_size: int = 101  # no degree divides it
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    bias: bool = False
    all_ignored: bool = False
    chunk_size: int | None = None

    def __str__(self):
        return "-".join(f"{key}={value}" for key, value in self._asdict().items() if value != self._field_defaults[key])


CASES = [
    Case(vocab_size, smoothing, z_loss, bias, ignored, chunk_size)
    for vocab_size, smoothing, z_loss, bias, ignored, chunk_size in itertools.product(
        (96, 101), (0.0, 0.1), (0.0, 1e-2), (False, True), (False, True), (None, 5)
    )
]


def worst_difference(case: Case, axis=None, device: str = "cpu") -> float:
    """The largest difference to torch's, of the loss or a gradient, relative to the largest number there. ``axis``: this rank
    has a part of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(device)
        for size in ((37, 16), (case.vocab_size, 16), (case.vocab_size,))
    )
    labels = torch.randint(0, case.vocab_size, (37,), generator=generator).to(device)
    labels[:: 1 if case.all_ignored else 5] = -100
    plain = [x.clone().requires_grad_() for x in (hidden, weight, *([bias] if case.bias else []))]
    part = slice(None) if axis is None else slice(*_part_of(case.vocab_size, axis))
    mine = [x.detach()[... if i == 0 else part].clone().requires_grad_() for i, x in enumerate(plain)]
    logits = F.linear(*plain)
    z = (logits.logsumexp(-1).square() * (labels != -100)).sum() * case.z_loss
    want = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=case.label_smoothing) + z
    got = sw.linear_cross_entropy(
        mine[0],
        mine[1],
        labels,
        *mine[2:],
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
        chunk_size=case.chunk_size,
        axis=axis,
        vocab_size=None if axis is None else case.vocab_size,
    )
    (want * 0.3).backward()
    (got * 0.3).backward()
    pairs = [(got.detach(), want.detach())]
    pairs += [(x.grad, y.grad if i == 0 else y.grad[part]) for i, (x, y) in enumerate(zip(mine, plain, strict=True))]
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1.0)) for one, other in pairs)


def _part_of(size: int, axis) -> tuple[int, int]:
    each = -(-size // axis.size)
    return each * axis.rank, min(each * (axis.rank + 1), size)


def over_ranks(layout: str, cases: list[Case], device: str = "cpu", backend: str | None = None) -> dict[str, float]:
    linear_loss._MOST_LOGITS = 64  # so that the rows of a rank decide how many positions are taken at a time
    with sw.init(layout, device=device, backend=backend) as world:
        return {str(case): worst_difference(case, world.axis("tp"), device=device) for case in cases}
