"""What runs at the edges of a unit, beside FSDP2's own hooks: at what goes in, at what comes out, at a whole parameter's gradient."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._compat import is_accumulated
from shardwise.errors import UsageError
from shardwise.parallel.trees import leaves_of, map_leaves

__all__ = ["anchor_inputs", "before_accumulation", "mark_used", "refuse_ungathered", "whole_outputs"]


class _NotAView(torch.autograd.Function):
    """Identity whose result is no view: same memory, a graph node of its own."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _Anchor(torch.autograd.Function):
    """Identity whose result requires a gradient and sends none back."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor, _anchor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def anchor_inputs(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """FSDP2 reduces a unit when backward reaches its inputs; where none of them requires a gradient it reduces last, after
    the root. So a branch before the first block that only some ranks take changed the order of reductions on those ranks,
    and with units of one size gradients crossed without a word. With an input that requires one, the order is fixed."""
    tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors):
        return None
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    if first is None:
        return None
    anchored = _Anchor.apply(first, torch.zeros((), requires_grad=True))
    return map_leaves(lambda x: anchored if x is first else x, (args, kwargs))


def whole_outputs(_module: nn.Module, _args: Any, output: Any) -> Any:
    """FSDP2 gathers a unit for backward from a hook on its outputs, and an in-place operation on a view throws that hook
    away: backward then fails, or reduces nothing without a word. A Linear on 3-D input returns a view, and
    ``y = block(x); y += x`` is common, so units hand out tensors that are not views; nothing is copied."""
    if not torch.is_grad_enabled():
        return output
    return map_leaves(
        lambda t: _NotAView.apply(t) if isinstance(t, Tensor) and t.requires_grad and t._is_view() else t, output
    )


def mark_used(used: Tensor, position: int) -> Callable[[Tensor], None]:
    """A hook on a parameter that sets ``used[position]``. It holds the tensor alone: hooks live in C++, where a cycle through
    the engine, its model and groups is never freed."""

    def hook(_param: Tensor) -> None:
        used[position] = 1

    return hook


def before_accumulation(param: Tensor, method: Callable[[], None]) -> Callable[[Tensor], None]:
    """A hook on ``param`` that calls a bound method when a backward is about to add to its gradient; it keeps neither alive."""
    found, call = weakref.ref(param), weakref.WeakMethod(method)

    def hook(_grad: Tensor) -> None:
        tensor, bound = found(), call()
        if tensor is not None and bound is not None and is_accumulated(tensor):
            bound()

    return hook


def refuse_ungathered(name: str) -> Any:
    """Before a module inside a unit: refuses a call that did not come through the unit, by which its parameters are
    gathered. (torch's own error speaks of mixed tensors in an operator.)"""

    def before(module: nn.Module, _args: Any) -> None:
        if any(isinstance(param, DTensor) for param in module._parameters.values()):
            raise UsageError(
                f"a call of a part of the model, {type(module).__name__}, by itself",
                why="its parameters are cut over the ranks, and gathered only while the model's own forward runs",
                fix="call model(...); what else is to run belongs into its forward",
                name=name,
            )

    return before
