"""The plain Python state of modules: numbers, texts, containers of them, and tensors that are not registered."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardwise.model.names import canonical_modules, own_attributes


def plain_attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Canonical name of a module -> its attributes that are plain values, by name."""
    return {
        name: {attr: value for attr, value in own_attributes(child).items() if _is_plain(value)}
        for name, child in canonical_modules(module)
    }


def changed_attributes(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Those of ``now`` that differ from ``before``, or are not in it."""
    found = {
        name: {
            attr: value
            for attr, value in values.items()
            if not is_same_value(value, before.get(name, {}).get(attr, _NONE))
        }
        for name, values in now.items()
    }
    return {name: values for name, values in found.items() if values}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value and in containers in it, which may contain themselves."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, Tensor):
            found.append(inner)
        elif id(inner) not in seen and isinstance(inner, Mapping | list | tuple | set | frozenset):
            seen.add(id(inner))
            waiting += inner.values() if isinstance(inner, Mapping) else inner
    return found


_NONE = object()


def _is_plain(value: Any, depth: int = 6) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(inner, depth - 1) for pair in value.items() for inner in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return depth > 0 and all(_is_plain(inner, depth - 1) for inner in value)
    if type(value) is Tensor:
        return value.is_leaf  # what a forward has computed with gradients is no state, and cannot be copied
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two nested containers hold the same numbers, texts and tensors."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        known = a.device == b.device and a.device.type != "meta"
        return known and a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same_value, a, b))
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)
