"""The hooks around an optimizer's step: torch runs them in the order in which they were put on, inside of its own wrapper of ``step``."""

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import optimizer as torchs

from shardwise._torch.patches import patch

Hook = Callable[..., Any]
Around = Callable[[torch.optim.Optimizer], AbstractContextManager[None]]


def step_within(cls: type[torch.optim.Optimizer], around: Around) -> None:
    """Makes the step of the optimizers of a class run within ``around(optim)``, inside of torch's wrapper, and so of all hooks. A closure runs
    before it: they begin by it. May be called again."""
    is_hooked = getattr(cls.step, "hooked", False)  # torch does it when the first one is made
    inner = cls.step.__wrapped__ if is_hooked else cls.step  # type: ignore[attr-defined]
    if hasattr(inner, "shardwise_within"):
        return

    @functools.wraps(inner)
    def step(optim: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with around(optim):
            inner(optim)
        return loss

    step.shardwise_within = True  # type: ignore[attr-defined]
    made: Any = torch.optim.Optimizer.profile_hook_step(step) if is_hooked else step
    made.hooked = is_hooked
    patch(cls, "step", made, "parts of parameters have torch's own classes meanwhile", is_guard=False)


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
