"""Catches an optimizer that was built before the module was sharded: it would step tensors nobody uses any more."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import UsageError

__all__ = ["mark_stale"]

_MARK = "_shardwise_replaced"
_installed = False


def mark_stale(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Remembers which parameter objects sharding replaced; any optimizer that steps one of them raises UsageError."""
    global _installed
    for name, tensor in before.items():
        if after.get(name) is not tensor:
            setattr(tensor, _MARK, name)
    if not _installed:
        register_optimizer_step_pre_hook(_refuse_stale)
        _installed = True


def _refuse_stale(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = getattr(param, _MARK, None)
            if name is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} was built before the module was sharded",
                    why="it holds the old parameter objects: its steps would change nothing",
                    fix="build the optimizer from model.parameters() after parallelize",
                    name=name,
                )
