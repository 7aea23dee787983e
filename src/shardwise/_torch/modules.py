"""Kinds of modules, and functions that change every tensor of a module."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP as DDPModule  # noqa: N811 - replicate() adds it to the class
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.nn.utils import stateless
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from shardwise._torch.dtensor import cut_like, local_tensor
from shardwise._torch.patches import patch

__all__ = [
    "CALLS", "BatchNormBase", "DDPModule", "PausableHooks", "around_calls", "before_fan", "before_functional_call", "cast_floating",
    "is_spectral_norm", "materialise", "replace_apply",
]  # fmt: skip

CALLS = frozenset([nn.Module._call_impl.__code__])
"""The code, as frames have it, in which a module, its ``self``, is called."""


def before_fan(look: Callable[[Tensor], None]) -> None:
    """Calls ``look`` with each tensor that an initialiser of torch takes the number of inputs and outputs of. May be called again."""
    count = torch.nn.init._calculate_fan_in_and_fan_out
    if getattr(count, "shardwise_looks", None) is look:
        return

    @functools.wraps(count)
    def looked_at(tensor: Tensor) -> tuple[int, int]:
        look(tensor)
        return count(tensor)

    looked_at.shardwise_looks = look  # type: ignore[attr-defined]
    patch(nn.init, "_calculate_fan_in_and_fan_out", looked_at, "refuses to initialise a part of a parameter")


class PausableHooks:
    """Forward hooks that can be taken off and put back in less time than one call of a module takes.

    Args:
        handles: what ``register_forward_hook`` or ``register_forward_pre_hook`` has returned.
        first: those that are put back are called before all others of their module.
    """

    def __init__(self, handles: Iterable[RemovableHandle], *, first: bool = False):
        self._hooks: list[tuple[Any, int]] = [(handle.hooks_dict_ref(), handle.id) for handle in handles]
        self._functions = [hooks[key] for hooks, key in self._hooks]
        self._first, self._is_paused = first, False

    def pause(self) -> None:
        if self._is_paused:
            return
        self._is_paused = True
        for hooks, key in self._hooks:
            hooks.pop(key, None)

    def resume(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        for (hooks, key), function in zip(self._hooks, self._functions, strict=True):
            hooks[key] = function
            if self._first:
                hooks.move_to_end(key, last=False)


def materialise(module: nn.Module, device: torch.device, *, cut: torch.device) -> None:
    """Allocates the tensors of a sharded module that are still on meta: shards on device ``cut``, the rest on
    ``device``. Unlike ``to_empty`` it leaves real tensors alone, so that tied buffers stay tied."""

    def make(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        if isinstance(tensor, DTensor):  # without DTensor's dispatch, which takes a millisecond for each new shape
            return cut_like(torch.empty_like(local_tensor(tensor), device=cut), tensor)
        return torch.empty_like(tensor, device=device)

    module._apply(make)


def cast_floating(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``module.to(dtype)`` that keeps imaginary parts: complex tensors get the matching complex dtype."""
    if not any(tensor.is_complex() for tensor in (*module.parameters(), *module.buffers())):
        return module.to(dtype)

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module._apply(cast)


def replace_apply(check: Callable[[nn.Module, Callable[[Tensor], Tensor]], None]) -> None:
    """Calls ``check`` before a module applies a function to all its tensors, as ``to()``, ``half()`` and ``share_memory()`` do."""
    apply = nn.Module._apply

    @functools.wraps(apply)
    def checked(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        check(module, fn)
        return apply(module, fn, recurse)

    patch(nn.Module, "_apply", checked, "refuses half(), to() and share_memory() of a sharded model")


def around_calls(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes calls of ``module``, with the hooks on it, run what ``make`` makes of what they have run before."""
    before = vars(module).get(
        "_call_impl"
    )  # of an earlier call of this; else that of its class, which FSDP2 may change

    def inner(*args: Any, **kwargs: Any) -> Any:
        return type(module)._call_impl(module, *args, **kwargs) if before is None else before(*args, **kwargs)

    module.__dict__["_call_impl"] = make(inner)


def before_functional_call(check: Callable[[nn.Module, Any], None]) -> None:
    """Calls ``check`` with the module and the values before ``torch.func.functional_call`` calls the module."""
    call = stateless._functional_call

    @functools.wraps(call)
    def checked(module: nn.Module, values: Any, *args: Any, **kwargs: Any) -> Any:
        check(module, values)
        return call(module, values, *args, **kwargs)

    patch(
        stateless, "_functional_call", checked, "refuses functional_call with other values for a parameter that is cut"
    )


def is_spectral_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a spectral norm, as a parametrization or as a hook on the layer."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
