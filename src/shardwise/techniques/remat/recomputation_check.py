"""Compares the results of two runs of a block by digests, without keeping the results."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch.autograd import unseen
from shardwise.model.pytrees import leaves_of

__all__ = ["digest_of_result", "same_output"]


def digest_of_result(output: Any) -> list[Tensor]:
    """Of each floating tensor in a block's result its sum, its sum of squares, and the tolerance (relative to its norm)
    for kernels that add in no fixed order: enough to tell two runs apart without keeping the result. A dropout mask
    that is drawn again changes the sum by about its share of the norm, however large the rest is."""
    found = [t.detach() for t in leaves_of(output) if isinstance(t, Tensor) and t.is_floating_point()]
    with unseen():  # selective checkpointing counts the operators of both runs
        return [
            torch.stack([t.sum(dtype=torch.float64), t.double().square().sum(), _tolerance(t)])
            for t in found
            if t.numel()
        ]


def _tolerance(tensor: Tensor) -> Tensor:
    size = min(1e-2, 1e3 * torch.finfo(tensor.dtype).eps)
    return torch.full((), size, dtype=torch.float64, device=tensor.device)


def same_output(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two digests are of equal results, up to the order in which kernels add. Non-finite results are accepted:
    the step reports them."""
    with unseen():
        return len(first) == len(second) and all(
            not bool(a.isfinite().all()) or bool(((a - b)[:2].abs() <= a[2] * torch.stack([a[1].sqrt(), a[1]])).all())
            for a, b in zip(first, second, strict=True)
        )
