"""What autograd does now: the backward that runs, hooks on tensors, modes, checkpoints that run again."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unseen
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = [
    "StopRecomputation",
    "TorchDispatchMode",
    "at_end_of_backward",
    "checkpointed",
    "function_modes",
    "is_accumulated",
    "num_hooks",
    "share_hooks",
    "unseen",
]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls ``call`` when the backward that is running ends. Only from within one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_accumulated(param: Tensor) -> bool:
    """Whether the backward that is running adds to ``param.grad``; ``torch.autograd.grad`` does not. Only from within one."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node)
    except RuntimeError as error:  # how torch answers for a leaf that autograd.grad was asked for
        if "autograd.grad()" not in str(error):
            raise
        return False


def checkpointed(error: BaseException) -> Any:
    """The function that ``torch.utils.checkpoint`` ran again when ``error`` was found; None: it was not found there."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        again = getattr(frame.f_locals.get("frame"), "recompute_fn", None)
        if again is not None:
            return again.__closure__[again.__code__.co_freevars.index("fn")].cell_contents
    return None


def num_hooks(tensor: Tensor) -> tuple[int, int]:
    """How many hooks ``register_hook`` and ``register_post_accumulate_grad_hook`` have put on ``tensor``."""
    return len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ())


def share_hooks(tensor: Tensor, other: Tensor) -> None:
    """Puts the hooks of ``tensor`` on ``other`` as well. They are one collection: handles remove them from both."""
    on_tensor, after = num_hooks(tensor)
    if on_tensor:
        other._backward_hooks = tensor._backward_hooks
    if after:
        other._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def function_modes() -> list[Any]:
    """The modes that see every call of torch now, outermost first."""
    return torch.overrides._get_current_function_mode_stack()
