"""Calls that no function mode sees: of autograd functions and of those of ``torch.jit.script``, and code that packs what is kept for backwards."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_OWNER = torch.autograd.Function.__mro__[1]  # what Function.apply calls, also where the user's code has kept it


class Sees(Protocol):
    """Gets the calls of functions that no mode sees."""

    def applied(self, kind: type, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...

    def scripted(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def keeps_by(self, hook: Callable[[Tensor], Any]) -> bool: ...


@contextlib.contextmanager
def seen_by(mode: Sees) -> Iterator[None]:
    """Within: ``mode`` computes each autograd function, and each function of torch.jit.script, and says which hooks pack what is kept for backwards."""
    script = torch.jit.ScriptFunction
    before, enter = script.__call__, saved_tensors_hooks.__enter__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return mode.scripted(lambda *a, **k: before(function, *a, **k), args, kwargs)

    def entered(hooks: saved_tensors_hooks) -> None:
        return enter(hooks if mode.keeps_by(hooks.pack_hook) else saved_tensors_hooks(_same, _same))

    try:
        saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
        script.__call__ = call
        with applied_by(mode.applied):
            yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        script.__call__ = before


@contextlib.contextmanager
def applied_by(applied: Callable[[type, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within: ``applied(function, plain, args)`` computes each autograd function."""

    def apply(cls: type, *args: Any) -> Any:
        return applied(cls, super(_OWNER, cls).apply, args)  # type: ignore[misc]

    _OWNER.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _OWNER.apply  # type: ignore[attr-defined]


def is_users_hook(hook: Any) -> bool:
    """Whether a function is neither torch's nor Shardwise's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in ("torch", "shardwise")


def has_backward_hooks(module: nn.Module) -> bool:
    return any(
        is_users_hook(hook) for hooks in (module._backward_hooks, module._backward_pre_hooks) for hook in hooks.values()
    )


def _same(x: Tensor) -> Tensor:
    return x
