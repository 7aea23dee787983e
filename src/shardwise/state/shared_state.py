"""One tensor at several places of an optimizer's state, such as a count of steps for all parameters: its places are saved too, and it is one
tensor again where it is loaded. As several, a write into one would not reach the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch.dtensor import local_tensor
from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.parallel import Runtime

Shared = Sequence[Sequence[Sequence[str]]]
"""For each such tensor its places: the name of a parameter, and the place in its state."""


def shared_places(states: Mapping[str, Mapping[str, Any]]) -> list[list[list[str]]]:
    """The :data:`Shared` of ``states``: name -> place -> value."""
    at: dict[int, list[tuple[str, str, Tensor]]] = {}  # memory -> what is there
    for name, values in states.items():
        for place, value in values.items():
            if memory := memory_of(value):
                at.setdefault(memory, []).append((name, place, local_tensor(value)))
    groups = [group for group in at.values() if len(group) > 1]
    for (name, place, first), *others in groups:
        for other, its, tensor in others:
            if (tensor.shape, tensor.stride(), tensor.dtype) != (first.shape, first.stride(), first.dtype):
                raise UnsupportedError(
                    f"optimizer state {its!r}, another view of the memory of {place!r} of {name}",
                    why="each would be a tensor of its own after it is loaded, and a write into one would not reach the other",
                    fix="keep one of them, or put a copy of it under the other: x.clone()",
                    name=other,
                )
    return [[[name, place] for name, place, _ in group] for group in groups]


def memory_of(value: Any) -> int:
    """Where a tensor's memory begins; 0: it has none of its own, as codes behind another face, or it is no plain tensor."""
    local = local_tensor(value) if isinstance(value, Tensor) else None
    return local.data_ptr() if local is not None and local.layout is torch.strided else 0


def refuse_other_cuts(runtime: Runtime, shared: Shared, cut: Iterable[tuple[str, str]]) -> None:
    """Refuses one tensor for parameters of which each rank has other parts. ``cut``: places whose tensors are cut like their parameter."""
    params, cut = runtime.recipe.params, set(cut)
    for (name, place), *others in shared:
        for other, its in others:
            if (other, its) in cut and params[other].cuts != params[name].cuts:
                raise CheckpointError(
                    f"optimizer state {its!r}, which is one tensor with {place!r} of {name}",
                    why="the two parameters are cut in other ways in this layout",
                    fix="use the layout that it was saved under, or let the optimizer keep a tensor for each",
                    name=other,
                )


class OneForAll:
    """Called with the name of a parameter, a place in its state and what makes the value there: the value, made once for all places that
    share it."""

    def __init__(self, shared: Shared):
        self._first = {tuple(at): tuple(group[0]) for group in shared for at in group}
        self._made: dict[tuple[str, ...], Any] = {}

    def __call__(self, name: str, place: str, make: Callable[[], Any]) -> Any:
        first = self._first.get((name, place))
        if first is None:
            return make()
        if first not in self._made:
            self._made[first] = make()
        return self._made[first]
