"""Compares the results of two runs of a block by digests, without keeping the results."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch.autograd import unseen
from shardwise.model.pytrees import leaves_of, tensors_within


def digest_of_result(output: Any) -> list[Tensor]:
    """Of each floating tensor in a block's result, also in an object's attributes: its sum, a sum that depends on the
    places of its elements, its sum of squares, and the tolerance (relative to its norm) for kernels that add in no fixed
    order: enough to tell two runs apart without keeping the result. A dropout mask that is drawn again changes the sum
    by about its share of the norm, however large the rest is."""
    tensors = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor)] + tensors_within(output)[0]
    found = [t.detach() for t in tensors if t.is_floating_point()]
    with unseen():  # selective checkpointing counts the operators of both runs
        return [_digest(t.double().flatten(), _tolerance(t)) for t in found if t.numel()]


def _digest(flat: Tensor, tolerance: Tensor) -> Tensor:
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64).mul_(0.7548776662).frac_()
    return torch.stack([flat.sum(), flat.dot(places), flat.dot(flat), tolerance])


def _tolerance(tensor: Tensor) -> Tensor:
    size = min(1e-2, 1e3 * torch.finfo(tensor.dtype).eps)
    return torch.full((), size, dtype=torch.float64, device=tensor.device)


def same_output(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two digests are of equal results, up to the order in which kernels add. Non-finite results are accepted:
    the step reports them."""
    with unseen():
        if len(first) != len(second):
            return False
        same = [_is_same(a, b).cpu() for a, b in zip(first, second, strict=True)]
        return all(map(bool, same))


def _is_same(a: Tensor, b: Tensor) -> Tensor:
    is_near = (a - b)[:3].abs() <= a[3] * torch.stack([a[2].sqrt(), a[2].sqrt(), a[2]])
    return is_near.all() | ~a.isfinite().all()
