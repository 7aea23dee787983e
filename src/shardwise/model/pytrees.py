"""Walks the containers in which modules pass tensors: tuples, lists, mappings, torch's pytrees, and dataclasses."""

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise._torch.pytrees import tree_flatten, tree_unflatten

__all__ = ["leaves_of", "map_leaves", "tensors_within"]

_MOST = 2000  # objects inspected in one output, at most


def map_leaves(call: Callable[[Any], Any], value: Any) -> Any:
    """torch's ``tree_map`` that also maps the fields of dataclasses, as FSDP2 does; a changed dataclass is copied."""
    leaves, spec = tree_flatten(value)
    return tree_unflatten([_map_leaf(call, leaf) for leaf in leaves], spec)


def leaves_of(value: Any) -> list[Any]:
    """The leaves on which :func:`map_leaves` would call its function, in order."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, value)
    return found


def _map_leaf(call: Callable[[Any], Any], leaf: Any) -> Any:
    if isinstance(leaf, Tensor | type) or not dataclasses.is_dataclass(leaf):
        return call(leaf)
    changed = {}
    for field in dataclasses.fields(leaf):
        old = getattr(leaf, field.name, None)
        new = map_leaves(call, old)
        if any(a is not b for a, b in zip(tree_flatten(old)[0], tree_flatten(new)[0], strict=True)):
            changed[field.name] = new
    if not changed:
        return leaf
    leaf = copy.copy(leaf)  # not dataclasses.replace, which would run __init__ again
    for name, new in changed.items():
        object.__setattr__(leaf, name, new)  # works for a frozen dataclass too
    return leaf


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, enum.Enum, np.ndarray, np.generic, range, slice)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.Size, torch.Generator, torch.layout, torch.memory_format)
_MAY_HOLD = (
    functools.partial,
    types.FunctionType,
    types.MethodType,
    types.GeneratorType,
    types.CoroutineType,
    nn.Module,
)


def tensors_within(value: Any) -> tuple[list[Tensor], bool]:
    """Tensors in the attributes and containers of objects that :func:`map_leaves` treats as leaves, and whether those
    are all: a closure, a generator or a module may make others later, and an object without attributes hides its own.
    """
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = [leaf for leaf in leaves_of(value) if not isinstance(leaf, (Tensor, *_PLAIN, *_PLAIN_TORCH))]
    is_complete = True
    while todo and len(seen) < _MOST:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (*_PLAIN, *_PLAIN_TORCH)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif not isinstance(item, _MAY_HOLD) and (held := _attributes(item)) is not None:
            todo += held
        else:
            is_complete = False
    return found, is_complete and not todo


def _attributes(item: Any) -> list[Any] | None:
    """The values of an object's attributes; None if it has none that can be read."""
    slots: Iterable[str] = (name for cls in type(item).__mro__ for name in _as_names(vars(cls).get("__slots__", ())))
    held = [getattr(item, name) for name in slots if hasattr(item, name)]
    attributes = getattr(item, "__dict__", None)
    if attributes is None and not held:
        return None
    return [*held, *(attributes or {}).values()]


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
