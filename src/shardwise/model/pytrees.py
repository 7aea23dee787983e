"""Walks the containers in which modules pass tensors: tuples, lists, mappings, torch's pytrees, and dataclasses."""

import ast
import copy
import dataclasses
import enum
import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise._torch.pytrees import tree_flatten, tree_unflatten

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


def keyed_leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """What is in tuples, lists, mappings and dataclasses, each with its path as text: ``[0]['x']``."""
    children = _children(value)
    if children is None:
        return [(path, value)]
    return [found for key, child in children for found in keyed_leaves(child, f"{path}[{key!r}]")]


def keys_of(path: str) -> list[Any]:
    """The keys in a path of :func:`keyed_leaves`."""
    return [ast.literal_eval(key) for key in re.findall(r"\[([^\]]*)\]", path)]


def changed_at(value: Any, keys: list[Any], change: Callable[[Any], Any]) -> Any:
    """``value`` with what ``change`` makes of the leaf at :func:`keys_of` a path. torch.compile can trace it, for tuples, lists and
    dictionaries."""
    if not keys:
        return change(value)
    if type(value) is dict:
        return {**value, keys[0]: changed_at(value[keys[0]], keys[1:], change)}
    if type(value) in (tuple, list):
        items = list(value)
        items[keys[0]] = changed_at(items[keys[0]], keys[1:], change)
        return tuple(items) if type(value) is tuple else items
    path = "".join(f"[{key!r}]" for key in keys)
    if all(path != other for other, _ in keyed_leaves(value)):
        raise KeyError(path)
    return map_keyed(lambda other, x: change(x) if other == path else x, value)


def map_keyed(call: Callable[[str, Any], Any], value: Any, path: str = "") -> Any:
    """``value`` with what ``call(path, leaf)`` returns in place of each of :func:`keyed_leaves`. A container in which nothing is another
    is the same object."""
    children = _children(value)
    if children is None:
        return call(path, value)
    made = [(key, child, map_keyed(call, child, f"{path}[{key!r}]")) for key, child in children]
    changed = {key: new for key, old, new in made if new is not old}
    if not changed:
        return value
    if isinstance(value, tuple):
        items = [new for _, _, new in made]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    result = copy.copy(value)
    for key, new in changed.items():
        if isinstance(value, list | Mapping):
            result[key] = new
        else:
            object.__setattr__(result, key, new)  # works for a frozen dataclass too
    return result


def with_own_containers(value: Any) -> Any:
    """``value`` in containers that no other code changes, with the same leaves."""
    held = map_keyed(lambda _, x: types.SimpleNamespace(leaf=x), value)
    return map_keyed(lambda _, x: x.leaf, held)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Key and value of what a container holds; None: it is none."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


class Replaced:
    """Arguments of a forward with other leaves, in the caller's own lists, dicts and dataclasses: what the forward writes
    into those must not be lost. Tuples, frozen dataclasses and torch's other pytrees, which no forward writes into, are
    made anew where something in them is replaced.

    Args:
        call: returns what takes the place of a leaf.
        value: the arguments.

    Attributes:
        value: the arguments to call with.
    """

    def __init__(self, call: Callable[[Any], Any], value: Any):
        self._call = call
        self._undo: list[Callable[[], None]] = []
        self.value = self._replaced(value)

    def undo(self) -> None:
        """Puts the caller's own leaves back, where they have not been replaced again since."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._call(value)
        if isinstance(value, list):
            return self._in_place(value, dict(enumerate(value)), value.__setitem__, lambda i: value[i])
        if isinstance(value, dict):
            return self._in_place(value, dict(value), value.__setitem__, lambda key: value[key])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if not type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
                fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
                put = functools.partial(object.__setattr__, value)
                return self._in_place(value, fields, put, functools.partial(getattr, value))
            return _map_leaf(self._call, value)
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            items = [self._replaced(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return tuple(items) if type(value) is tuple else type(value)(*items)
        return map_leaves(self._call, value)

    def _in_place(
        self, value: Any, items: dict[Any, Any], put: Callable[[Any, Any], None], get: Callable[[Any], Any]
    ) -> Any:
        for key, old in items.items():
            new = self._replaced(old)
            if new is not old:
                put(key, new)
                self._undo.append(functools.partial(_put_back, key, old, new, put, get))
        return value


def _put_back(key: Any, old: Any, new: Any, put: Callable[[Any, Any], None], get: Callable[[Any], Any]) -> None:
    try:
        is_there = get(key) is new
    except (LookupError, AttributeError):  # it was removed
        return
    if is_there:
        put(key, old)


def _map_leaf(call: Callable[[Any], Any], leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, Tensor | type) or not dataclasses.is_dataclass(leaf):
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
    functools.partial, types.FunctionType, types.MethodType, types.GeneratorType, types.CoroutineType, nn.Module,
)  # fmt: skip


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
