"""Gradients of ``accumulate`` that wait for the last micro-batch: until it has come they are this rank's alone, and a step by
them lets the ranks drift apart without a word."""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import UsageError
from shardwise.parallel.runtime import Runtime

__all__ = ["note_unsummed", "refuse_unsummed", "refuse_unsummed_step"]

_noted: weakref.WeakSet[Runtime] = weakref.WeakSet()
_is_installed = False


def note_unsummed(runtime: Runtime) -> None:
    """From now until its gradients are summed, steps of optimizers on ``runtime``'s parameters are refused."""
    global _is_installed
    _noted.add(runtime)
    if not _is_installed:
        register_optimizer_step_pre_hook(refuse_unsummed_step)
        _is_installed = True


def refuse_unsummed(runtime: Runtime, what: str) -> None:
    """Raises UsageError if ``what`` comes while gradients wait for the last micro-batch."""
    if runtime not in _noted:
        return
    if runtime.engine.waits():
        raise UsageError(
            f"{what} after accumulate(model, is_last=False), and no is_last=True since",
            why="gradients are summed over the ranks at the last micro-batch: those that are there now are this rank's alone",
            fix="run the last micro-batch before it in sw.accumulate(model, is_last=True), also where an epoch ends early",
        )
    _noted.discard(runtime)


def refuse_unsummed_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The same for a step of ``optimizer``, if it holds parameters of such a model."""
    for runtime in list(_noted):
        held = {id(param) for param in runtime.parameters.values()}
        if any(id(param) in held for group in optimizer.param_groups for param in group["params"]):
            refuse_unsummed(runtime, f"{type(optimizer).__name__}.step()")
