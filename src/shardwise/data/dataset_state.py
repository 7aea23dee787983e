"""The state inside a dataset, for resuming: objects with ``state_dict`` and ``load_state_dict``, and random generators.

A :class:`~shardwise.Loader` reads samples by number, so that a dataset without either is the same after a resume. One
that counts or draws random numbers resumes from its own state. Each rank has its own, since it reads other samples.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardwise.world.rng import is_generator, set_state, state_of

_DEPTH, _MOST = 8, 64  # levels of attributes searched; longer lists and mappings are not searched


@dataclass(frozen=True)
class DatasetState:
    """The stateful objects inside a dataset, or copies of their states.

    Attributes:
        values: place ("dataset.transform.rng") -> the object, or its state in what :meth:`taken` returns.
    """

    values: Mapping[str, Any]

    def __bool__(self) -> bool:
        return bool(self.values)

    def taken(self) -> "DatasetState":
        return DatasetState({place: _state_of(value) for place, value in self.values.items()})


def states_in(**roots: Any) -> DatasetState:
    """Finds the stateful objects among ``roots``, and inside them."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, root in roots.items():
        for place, value in _inside(root, name, seen, _DEPTH):
            found[place] = value
    return DatasetState(found)


def load_states(found: DatasetState, states: Mapping[str, Any]) -> list[str]:
    """Loads ``states`` into the objects in ``found``; returns the places that are missing on one side."""
    places = [place for place in states if place in found.values]
    for place in sorted(places, key=lambda place: is_generator(found.values[place])):
        _set_state(found.values[place], states[place])
    return sorted(set(states) ^ set(found.values))


def _inside(value: Any, place: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or isinstance(
        value, type | Tensor | np.ndarray | nn.Module | str | bytes | int | float | None
    ):
        return
    seen.add(id(value))
    if is_generator(value):
        yield place, value
        return
    if all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        yield place, value
    if depth:
        for name, inner in _members(value):
            yield from _inside(inner, f"{place}.{name}", seen, depth - (not isinstance(value, list | tuple)))


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from {"func": value.func, **dict(enumerate(value.args)), **value.keywords}.items()  # type: ignore[misc]
    elif isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        if len(value) <= _MOST:
            yield from ((str(name), inner) for name, inner in items)
    elif hasattr(value, "__self__"):
        yield "self", value.__self__
    else:
        yield from (getattr(value, "__dict__", None) or {}).items()


def _state_of(value: Any) -> Any:
    return state_of(value) if is_generator(value) else copy.deepcopy(value.state_dict())


def _set_state(value: Any, state: Any) -> None:
    if is_generator(value):
        set_state(value, state)
    else:
        value.load_state_dict(copy.deepcopy(state))
