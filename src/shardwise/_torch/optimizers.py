"""The hooks around an optimizer's step: torch runs them in the order in which they were put on, inside of its own wrapper of ``step``."""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim import optimizer as torchs

__all__ = ["innermost_hooks", "own_step_of", "step_hooks", "unhooked_step"]

Hook = Callable[..., Any]
_innermost: "weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]]" = weakref.WeakKeyDictionary()


def innermost_hooks(optim: torch.optim.Optimizer, before: Hook, after: Hook) -> None:
    """Makes ``before`` the last of the hooks before a step of ``optim``, and ``after`` the first after it. Called in a hook for all
    optimizers, which come before both."""
    if optim not in _innermost:
        _innermost[optim] = optim.register_step_pre_hook(before).id, optim.register_step_post_hook(after).id
    first, second = _innermost[optim]
    optim._optimizer_step_pre_hooks.move_to_end(first)  # type: ignore[attr-defined]
    optim._optimizer_step_post_hooks.move_to_end(second, last=False)  # type: ignore[attr-defined]


def step_hooks(optim: torch.optim.Optimizer, own: Collection[Hook]) -> tuple[list[Hook], list[Hook]]:
    """The hooks before and after a step of ``optim``, in torch's order, without those in ``own``."""
    before = (*torchs._global_optimizer_pre_hooks.values(), *optim._optimizer_step_pre_hooks.values())
    after = (*optim._optimizer_step_post_hooks.values(), *torchs._global_optimizer_post_hooks.values())
    return [hook for hook in before if hook not in own], [hook for hook in after if hook not in own]


def unhooked_step(optim: torch.optim.Optimizer) -> Callable[[], Any]:
    """The step of the class of ``optim``, without hooks."""
    return type(optim).step.__wrapped__.__get__(optim)  # type: ignore[attr-defined]


def own_step_of(optim: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """A ``step`` that was set on the object, below the wrapper of a scheduler; None: it is that of its class."""
    step = vars(optim).get("step")
    while hasattr(step, "_wrapped_by_lr_sched") and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return None if step is None or getattr(step, "__func__", step) is type(optim).step else step
