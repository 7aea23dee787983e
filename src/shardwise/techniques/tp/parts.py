"""Forwards of modules that are given a rank's part of what is no parameter: of arguments and buffers, of the outputs of a norm, of
a computed weight."""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.layout import Coord
from shardwise.recipe import Cut, Param, Part, extents
from shardwise.techniques.tp.layers import LayerOfRank, Shared
from shardwise.world.axis import Axis


def call_computed(module: nn.Linear, layer: LayerOfRank, given: Any, coord: Coord) -> None:
    """Makes ``module``, whose weight is computed, call ``layer`` with this rank's part of the weight.

    Args:
        module: whose forward is replaced.
        layer: of which this rank has a part.
        given: the dim along which the weight is cut, and its parts; no parts: evenly; None: it is not cut.
        coord: of this rank.
    """
    cut = None if given is None else _Cut((given[0], given[1] or [[module.in_features, 1]]), coord)

    def forward(input: Tensor) -> Tensor:
        weight = module.weight
        return layer(input, weight if cut is None else cut.of(weight, "a computed weight"), module.bias)

    module.forward = forward


def norm_whole(module: nn.Module, shared: Shared, axis: Axis, coord: Coord, args: Mapping[str, Any]) -> None:
    """Makes a norm compute on all of its inputs, of which this rank has a part, and return this rank's part.

    Args:
        module: whose forward is replaced.
        shared: what the cut layers share.
        axis: the ranks.
        coord: of this rank.
        args: ``gathers``: whether its input is a part, one of as many equal ones; ``parts``: how its output is cut; None:
            it is not; ``drops_part``: whether dropout follows it that is applied to a rank's part.
    """
    inner, is_gathered, is_cut = module.forward, args["gathers"], args["parts"] is not None
    stream = shared.stream
    cut = _Cut((-1, args["parts"]), coord) if is_cut else None

    @functools.wraps(inner)
    def forward(x: Tensor) -> Tensor:
        if stream is not None:
            stream.leave()
        if is_gathered:
            x = shared.gather(x, axis.size, axis.rank, has_part=is_cut)
        elif is_cut:
            x = shared.sum_gradient(x)
        y = inner(x)
        y = y if cut is None else cut.of(y, "the outputs of a norm")
        if args["drops_part"] and stream is not None:
            stream.enter()
        return y

    module.forward = forward


def work_on_parts(
    module: nn.Module, shared: Shared, coord: Coord, args: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> None:
    """Gives the forward of ``module`` this rank's part of arguments and buffers.

    Args:
        module: whose forward is replaced.
        shared: what the cut layers share.
        coord: of this rank.
        args: ``arguments``: place and cut of each, None: whole, and its gradient is summed; ``narrowed``: places;
            ``buffers``: name and cut of each.
        modules: all modules by name.
    """
    inner, names = module.forward, list(inspect.signature(module.forward).parameters)
    given = {_normal(place, names): cut for place, cut in args["arguments"]}
    cuts = {place: cut and _Cut(cut, coord) for place, cut in given.items()}
    narrowed = {_normal(place, names) for place in args["narrowed"]}
    buffers = []
    for name, cut in args["buffers"].items():
        path, _, attr = name.rpartition(".")
        buffers.append((modules[path], attr, _Cut(cut, coord)))
    degree = coord.degree("tp")

    def change(value: Any, place: tuple[Any, ...], known: list[tuple[Tensor, Any, Tensor]]) -> Any:
        if type(value) in (tuple, list):
            return type(value)(change(item, (*place, i), known) for i, item in enumerate(value))
        if not isinstance(value, Tensor) or (place not in narrowed and place not in cuts):
            return value
        how = (place in narrowed, given.get(place))
        for other, its, changed in known:  # arguments that are one tensor stay one
            if other is value and its == how:
                return changed
        known.append((value, how, part(value, place)))
        return known[-1][2]

    def part(value: Tensor, place: tuple[Any, ...]) -> Tensor:
        if place in narrowed:
            return shared.narrow(value, value.shape[-1] // degree)
        value, cut = shared.sum_gradient(value), cuts[place]
        return value if cut is None else cut.of(value, f"argument {place[0]!r}")

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        known: list[tuple[Tensor, Any, Tensor]] = []
        args = tuple(change(value, (names[i] if i < len(names) else i,), known) for i, value in enumerate(args))
        kwargs = {key: change(value, (key,), known) for key, value in kwargs.items()}
        if not buffers:
            return inner(*args, **kwargs)
        with _buffers_of_rank(buffers):
            return inner(*args, **kwargs)

    module.forward = forward


class _Cut:
    """How a dim of a tensor that is no parameter is cut.

    Args:
        given: the dim, and ``[size, replicas]`` of each part.
        coord: of this rank.
    """

    def __init__(self, given: Any, coord: Coord):
        self.dim, parts = given
        self._sizes = [size for size, _ in parts]
        self._here = _indices([Part(size=size, replicas=replicas) for size, replicas in parts], coord)
        # Several equal parts, as of heads in each sample of a batch, are as many as there are; one part may be of heads alone, or of
        # samples within heads.
        self._of_one = None
        if len(parts) > 1 and all(part == parts[0] for part in parts) and self.dim >= 0:
            self._of_one = _indices([Part(size=parts[0][0], replicas=parts[0][1])], coord)

    def of(self, whole: Tensor, what: str) -> Tensor:
        size, here = whole.shape[self.dim], self._here
        if self._of_one is not None and size % self._sizes[0] == 0:
            here = (torch.arange(0, size, self._sizes[0]).unsqueeze(1) + self._of_one).flatten()
        elif size != sum(self._sizes):
            raise UsageError(
                f"{what} of shape {tuple(whole.shape)}",
                why=f"its dim {self.dim} is cut over tp in parts of {self._sizes}, as the example had it",
                fix="give example= a batch of two samples or more, as training will give it",
            )
        return whole.index_select(self.dim, here.to(whole.device))


def _indices(parts: list[Part], coord: Coord) -> Tensor:
    """The indices of a rank in a dim of these parts that is cut over ``tp``."""
    none = {"dtype": "", "trainable": False, "aliases": (), "unit": "", "storage": "", "compute": "", "reduce": ""}
    cuts = (Cut(axis="tp", dim=0, parts=tuple(parts)),)
    line = Param(shape=(sum(part.size for part in parts),), cuts=cuts, **none)  # type: ignore[arg-type]
    pieces = extents(line, coord)
    return torch.cat([torch.arange(piece.starts[0], piece.starts[0] + piece.sizes[0]) for piece in pieces])


def _normal(place: list[Any], names: list[str]) -> tuple[Any, ...]:
    """A place whose argument is named, if it has a name: callers may give it either way."""
    first, *rest = place
    return (names[first] if isinstance(first, int) and first < len(names) else first, *rest)


@contextlib.contextmanager
def _buffers_of_rank(buffers: list[tuple[nn.Module, str, _Cut]]) -> Iterator[None]:
    """Within: modules have this rank's part of buffers, which are kept whole: they are saved and compared so."""
    whole = [owner._buffers[attr] for owner, attr, _ in buffers]
    for (owner, attr, cut), buffer in zip(buffers, whole, strict=True):
        owner._buffers[attr] = None if buffer is None else cut.of(buffer, attr)
    try:
        yield
    finally:
        for (owner, attr, _), buffer in zip(buffers, whole, strict=True):
            owner._buffers[attr] = buffer
