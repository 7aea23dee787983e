"""Gradient buckets: gradients that are all-reduced together as one flat tensor."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.operators import foreach_copy
from shardwise.model.large_pages import in_large_pages

_SETTLE_S = 5.0


def make_buckets(params: list[nn.Parameter], cap_bytes: int) -> list["Bucket"]:
    """Puts neighbouring parameters of one dtype and device into buckets, from the last parameter to the first, since
    backward reaches them in that order. A bucket is full at ``cap_bytes``. At least one bucket."""
    groups: list[list[int]] = []
    size = 0
    for i in reversed(range(len(params))):
        param = params[i]
        if not groups or size >= cap_bytes or _kind(params[groups[-1][-1]]) != _kind(param):
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += param.numel() * param.element_size()
    return [Bucket({i: params[i] for i in group}) for group in groups]


def _has_own_order(param: nn.Parameter) -> bool:
    """Whether a parameter has strides of its own (channels_last), in which its gradient fills memory without gaps too: fused
    optimizers require the same of both."""
    if param.numel() == 0 or param.stride() == torch.empty(param.shape, device="meta").stride():
        return False
    return torch.empty_like(param, device="meta").stride() == param.stride()


def _kind(param: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return param.dtype, param.device


class Bucket:
    """The gradients of some parameters, and the flat tensor in which they are all-reduced.

    Attributes:
        members: index -> parameter.
        missing: indices whose gradient this pass has not produced yet.
        flat: the flat tensor: the gradients one after another.
        work: the running all-reduce, once it was started.
    """

    def __init__(self, members: dict[int, nn.Parameter]):
        self.members = members
        self._sizes = [param.numel() for param in members.values()]
        self._in_own_order = {i for i, param in members.items() if _has_own_order(param)}
        self.reset()

    def reset(self) -> None:
        """Prepares the bucket for the next pass. The flat tensor stays alive where gradients are views of it."""
        self.missing = set(self.members)
        self.flat = torch.empty(0)
        self._views: dict[int, Tensor] = {}
        self.work: Any = None

    def fill(self, grads: Mapping[int, Tensor | None]) -> None:
        """Writes ``grads`` (None counts as zeros) into a new flat tensor."""
        self.flat, self._views = self._packed(grads)

    def packed(self, grads: Mapping[int, Tensor | None]) -> Tensor:
        """``grads`` one after another in a new tensor, zeros for None."""
        return self._packed(grads)[0]

    def _packed(self, grads: Mapping[int, Tensor | None]) -> tuple[Tensor, dict[int, Tensor]]:
        like = next(iter(self.members.values()))
        flat = torch.empty(sum(self._sizes), dtype=like.dtype, device=like.device)
        # Each step takes this memory anew: page by page that takes as long as writing it.
        in_large_pages([flat])
        views = self.views_of(flat)
        # By hand a gradient may be set that is part of a graph.
        found = {
            i: (grad.to_dense() if grad.is_sparse else grad).detach() for i, grad in grads.items() if grad is not None
        }
        for i in views.keys() - found.keys():
            views[i].zero_()
        if found:
            foreach_copy([views[i] for i in found], [*found.values()])
        return flat, views

    def views(self) -> dict[int, Tensor]:
        """Index -> gradient, as a view of the flat tensor."""
        return self._views

    def views_of(self, flat: Tensor) -> dict[int, Tensor]:
        pieces = flat.split(self._sizes)
        # view_as makes no shape objects in Python, which take longer than the views.
        views = dict(zip(self.members, map(Tensor.view_as, pieces, self.members.values()), strict=True))
        for i in self._in_own_order:
            views[i] = views[i].as_strided(self.members[i].shape, self.members[i].stride())
        return views

    def settle(self) -> None:
        """Waits for an all-reduce that was left running; bounded, since a peer that has ended will never take part."""
        end = time.monotonic() + _SETTLE_S
        with contextlib.suppress(RuntimeError):  # it failed: nothing writes to the tensor any more
            while self.work is not None and not self.work.is_completed() and time.monotonic() < end:
                time.sleep(1e-3)
