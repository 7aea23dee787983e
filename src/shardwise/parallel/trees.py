"""What tensors are handed about in, as inputs and outputs: tuples, lists, mappings, whatever torch's pytree knows, and dataclasses."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise._compat import tree_flatten, tree_unflatten

__all__ = ["leaves_of", "map_leaves"]


def map_leaves(call: Callable[[Any], Any], value: Any) -> Any:
    """torch's ``tree_map`` that also looks into dataclasses, as FSDP2 does: one that would change is copied."""
    leaves, spec = tree_flatten(value)
    return tree_unflatten([_map_leaf(call, leaf) for leaf in leaves], spec)


def leaves_of(value: Any) -> list[Any]:
    """What :func:`map_leaves` would call, in order."""
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
    leaf = copy.copy(leaf)  # and not dataclasses.replace, which would run __init__ again
    for name, new in changed.items():
        object.__setattr__(leaf, name, new)  # also of a frozen one
    return leaf
