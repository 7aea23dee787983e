"""Which modules answer for their state themselves: by ``_save_to_state_dict``, ``_load_from_state_dict``, ``state_dict``, or
hooks on these."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.model.names import canonical_modules

_METHODS = ("_save_to_state_dict", "_load_from_state_dict", "state_dict", "load_state_dict")
_EXTRA = ("get_extra_state", "set_extra_state")
_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def has_only_extra_states(methods: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether there is none of :func:`own_methods` but ``get_extra_state`` and ``set_extra_state``."""
    return all(method in _EXTRA for own in methods.values() for method in own)


def own_methods(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Canonical name of a module -> its methods and hooks that say what it stores, which are not torch's."""
    found = {}
    for name, child in canonical_modules(module):
        own = [method for method in (*_METHODS, *_EXTRA) if is_own(child, method)]
        own += [hooks for hooks in _HOOKS if getattr(child, hooks, None)]
        if own:
            found[name] = tuple(own)
    return found


def is_own(module: nn.Module, method: str) -> bool:
    """Whether a method is the user's: of the object or of a class that is not torch's."""
    return method in vars(module) or _is_of_user(type(module), method)


@functools.lru_cache(1024)  # a model has few classes, and many modules
def _is_of_user(kind: type, method: str) -> bool:
    owner = next((base for base in kind.__mro__ if method in vars(base)), nn.Module)
    return owner.__module__.partition(".")[0] != "torch"


def answering_functions(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """The functions by which a module answers, each with the dict and the key that have it."""
    for hooks in (getattr(module, name, None) or {} for name in _HOOKS):
        for key, hook in hooks.items():
            held, at = (hooks, key) if inspect.isfunction(hook) else (getattr(hook, "__dict__", {}), "hook")
            if inspect.isfunction(held.get(at)):
                yield held, at, held[at]
    for name in (*_METHODS, *_EXTRA):
        if inspect.isfunction(vars(module).get(name)):
            yield vars(module), name, vars(module)[name]
