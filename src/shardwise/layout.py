"""Layouts: how many ranks each mesh axis has, and the mesh coordinates of every rank, as plain data without torch.

A layout is a grid. Its axes, outer to inner, are ``pp, dp_replicate, dp_shard, cp, tp``; rank 0 is the first cell and
the innermost axis moves fastest, so ``rank = ravel(coordinates)``. A derived axis joins mesh axes for one purpose:
``dp`` (ranks that read different data), ``fsdp`` (ranks over which parameters are sharded), ``loss`` (ranks over which
loss and gradients are summed). A carved axis divides the ranks of another one anew, and adds none: ``ep`` takes neighbours
along ``fsdp``, and ``efsdp`` is what is left of it. ``dp_shard=node`` stands for the number of ranks of a node.
:mod:`shardwise.world` turns a layout into process groups.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.config.axis_words import axis_answer
from shardwise.config.suggest import closest
from shardwise.errors import LayoutError, UnsupportedError

__all__ = [
    "ALL_AXES", "AXES", "CARVED", "DERIVED_AXES", "GIVEN_AXES", "NODE", "Coord", "Layout", "layout_of", "mesh_axes",
    "num_ranks_of", "overlap", "parse_layout",
]  # fmt: skip

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DERIVED_AXES = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
# Axis with a degree of its own -> the axis whose ranks it divides, and what is left of that.
CARVED = {"ep": ("fsdp", "efsdp")}
GIVEN_AXES = (*AXES, *CARVED)  # those that a layout gives a degree
_LEFT = {left: axis for axis, (_, left) in CARVED.items()}
ALL_AXES = (*GIVEN_AXES, *DERIVED_AXES, *_LEFT)
_MAIN = {"dp": "dp_shard", "fsdp": "dp_shard", "loss": "dp_shard"}  # what stands for a derived axis of one rank
NODE = "node"  # a degree of dp_shard: as many ranks as a node has
_EXAMPLE = '"dp_shard=4" or "dp_replicate=2,dp_shard=-1"'


@dataclass(frozen=True)
class Layout:
    """How many ranks each mesh axis has; every degree is at least 1. Build one with :func:`layout_of`.

    Args:
        pp, dp_replicate, dp_shard, cp, tp: degrees, outer to inner.
        ep: how many neighbours along ``fsdp`` make up one group; it adds no ranks, and divides ``dp_shard * cp``.

    An axis that no technique uses yet (``pp``, ``cp``, ``ep``) is refused by ``init``.

    Example:
        >>> layout = Layout(dp_replicate=2, dp_shard=2)
        >>> layout.size, layout.coord(3).index("dp_shard"), layout.groups("dp_shard")
        (4, 1, ((0, 1), (2, 3)))
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @cached_property
    def degrees(self) -> dict[str, int]:
        """Degree of every mesh axis, outer to inner."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def all_degrees(self) -> dict[str, int]:
        """What ``Layout(**...)`` makes this layout of: :attr:`degrees`, and those of carved axes of more than one rank."""
        return {**self.degrees, **{axis: degree for axis in CARVED if (degree := getattr(self, axis)) > 1}}

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one rank whose ranks run the same samples, of which one counts."""
        return tuple(axis for axis in AXES if axis not in DERIVED_AXES["loss"] and self.degrees[axis] > 1)

    def degree(self, axis: str) -> int:
        """Degree of any axis."""
        if axis in CARVED:
            return int(getattr(self, axis))
        whole = math.prod(self.degrees[a] for a in mesh_axes(axis))
        return whole // self.degree(_LEFT[axis]) if axis in _LEFT else whole

    def text_of(self, axis: str) -> str:
        """Degrees of the mesh axes of an axis that have several ranks, as text: "dp_shard=2,cp=2"."""
        if axis in CARVED or axis in _LEFT:
            return f"{axis}={self.degree(axis)}"
        names = [name for name in mesh_axes(axis) if self.degrees[name] > 1] or [_MAIN.get(axis, axis)]
        return ",".join(f"{name}={self.degrees[name]}" for name in names)

    def coord(self, rank: int) -> "Coord":
        """The mesh coordinates of ``rank``."""
        if not 0 <= rank < self.size:
            raise LayoutError(
                f"rank {rank} of layout {self}",
                why=f"this layout has ranks 0 to {self.size - 1}",
                fix=f"ask for a rank below {self.size}",
            )
        indices, rest = {}, rank
        for axis in reversed(AXES):
            rest, indices[axis] = divmod(rest, self.degrees[axis])
        return Coord(self, rank, tuple(indices[axis] for axis in AXES))

    def rank_at(self, indices: Mapping[str, int]) -> int:
        """The rank at these mesh coordinates; an axis that is left out counts as 0."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degrees[axis] + indices.get(axis, 0)
        return rank

    def ranks_along(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axis``, in axis order."""
        if axis in CARVED or axis in _LEFT:
            carved = _LEFT.get(axis, axis)
            whole, size = self.ranks_along(CARVED[carved][0], rank), self.degree(carved)
            at = whole.index(rank)
            return whole[at % size :: size] if axis in _LEFT else whole[at - at % size :][:size]
        here = self.coord(rank)
        cells = [dict(zip(AXES, here.indices, strict=True))]
        for name in mesh_axes(axis):
            cells = [{**cell, name: i} for cell in cells for i in range(self.degrees[name])]
        return tuple(self.rank_at(cell) for cell in cells)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks along ``axis``, each in axis order; every rank is in exactly one of them."""
        found: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.size):
            if rank not in seen:
                found.append(self.ranks_along(axis, rank))
                seen.update(found[-1])
        return tuple(found)

    def __str__(self) -> str:
        given = ",".join(f"{axis}={degree}" for axis, degree in self.all_degrees.items() if degree > 1)
        return given or "dp_shard=1"


@dataclass(frozen=True)
class Coord:
    """The mesh coordinates of one rank in a layout."""

    layout: Layout
    rank: int
    indices: tuple[int, ...]  # along AXES

    def index(self, axis: str) -> int:
        """Index of the rank along any axis."""
        if axis in CARVED:
            return self.index(CARVED[axis][0]) % self.layout.degree(axis)
        if axis in _LEFT:
            return self.index(CARVED[_LEFT[axis]][0]) // self.layout.degree(_LEFT[axis])
        index = 0
        for name in mesh_axes(axis):
            index = index * self.layout.degrees[name] + self.indices[AXES.index(name)]
        return index

    def degree(self, axis: str) -> int:
        """Degree of any axis."""
        return self.layout.degree(axis)


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes that an axis consists of, outer to inner; of a carved one those whose ranks it divides."""
    if axis in AXES:
        return (axis,)
    if axis in DERIVED_AXES:
        return DERIVED_AXES[axis]
    if axis in CARVED or axis in _LEFT:
        return mesh_axes(CARVED[_LEFT.get(axis, axis)][0])
    raise _unknown_axis(axis)


def overlap(axis: str, other: str) -> bool:
    """Whether ranks that differ along one axis may differ along the other too."""
    if axis != other and {axis, other} <= {*CARVED, *_LEFT}:  # the two that an axis was divided into
        return False
    return bool(set(mesh_axes(axis)) & set(mesh_axes(other)))


def layout_of(
    value: "str | Layout | Mapping[str, int | str]",
    num_ranks: int,
    ranks_per_node: int | Callable[[], int] | None = None,
    axes: Collection[str] = GIVEN_AXES,
) -> Layout:
    """The :class:`Layout` that ``value`` means on ``num_ranks`` ranks: parsed, ``-1`` inferred, refused if impossible.

    Args:
        value: ``"dp_shard=-1,dp_replicate=2"``, a mapping of degrees, or a :class:`Layout`.
        num_ranks: how many ranks there are.
        ranks_per_node: what ``dp_shard=node`` stands for, or a function that returns it, called only for such a layout.
        axes: the axes that some technique uses; a degree above 1 on any other axis is refused.

    Raises:
        LayoutError: unknown axis, degree 0, two ``-1``, ``node`` where the ranks of a node are not known or do not
            divide ``num_ranks``, or degrees that do not multiply to ``num_ranks``; the message names the nearest
            layouts that work.
        UnsupportedError: an axis that is not in ``axes``.
    """
    given = {a: d for a, d in value.all_degrees.items() if d != 1} if isinstance(value, Layout) else value
    degrees = parse_layout(given, axes)
    text = str(value) if isinstance(value, str | Layout) else _text_of(degrees)
    ranks = f"{num_ranks} rank" + ("s" if num_ranks != 1 else "")
    size = _node_size(text, num_ranks, ranks_per_node) if NODE in degrees.values() else 0
    found = {axis: size if degree == NODE else int(degree) for axis, degree in degrees.items()}
    carved = {axis: found.pop(axis) for axis in CARVED if axis in found}
    given = f"layout {text!r} on {ranks}" + (f", {size} on each node" if size else "")
    layout = Layout(**_infer(found, num_ranks, given))
    for axis, degree in carved.items():
        _refuse_carved(layout, axis, degree, given)
    return dataclasses.replace(layout, **carved)


def num_ranks_of(value: "str | Layout | Mapping[str, int | str]") -> int | None:
    """The number of ranks that the degrees of a layout multiply to; None where one of them is to be inferred."""
    if isinstance(value, Layout):
        return value.size
    degrees = {axis: degree for axis, degree in parse_layout(value).items() if axis in AXES}
    numbers = [degree for degree in degrees.values() if isinstance(degree, int) and degree > 0]
    return math.prod(numbers) if len(numbers) == len(degrees) else None


def parse_layout(value: str | Mapping[str, int | str], axes: Collection[str] = GIVEN_AXES) -> dict[str, int | str]:
    """Degree of each axis as written; ``-1`` and ``node`` are kept. ``axes``: those that some technique uses.

    Raises:
        LayoutError: not ``axis=degree`` pairs, unknown axis, an axis given twice, degree 0 or below -1, ``node`` for an
            axis other than ``dp_shard``.
        UnsupportedError: a degree other than 1 of an axis that is not in ``axes``.
    """
    pairs = list(_pairs(value)) if isinstance(value, str) else list(value.items())
    degrees: dict[str, int | str] = {}
    for axis, degree in pairs:
        if axis not in GIVEN_AXES:
            raise _unknown_axis(axis, degree, axes)
        if axis in degrees:
            raise LayoutError(f"layout {value!r}: {axis} twice", why="an axis has one degree", fix=f"keep one {axis}=")
        if degree == NODE and axis != "dp_shard":
            raise LayoutError(
                f"layout {value!r}: {axis}=node",
                why="the ranks of a node are neighbours, and neighbours are along dp_shard",
                fix='write "dp_replicate=-1,dp_shard=node" to shard within each node and replicate across nodes',
            )
        if degree != NODE and (isinstance(degree, bool) or not isinstance(degree, int) or degree == 0 or degree < -1):
            raise LayoutError(
                f"layout {value!r}: {axis}={degree}",
                why="a degree is a number of ranks, 1 or more, or -1 for 'whatever is left'; of dp_shard also 'node'",
                fix=f"write {axis}=1 or leave {axis} out",
            )
        if axis in CARVED and degree == -1:
            raise LayoutError(
                f"layout {value!r}: {axis}=-1",
                why=f"{axis} takes neighbours along {CARVED[axis][0]}, and no ranks of its own",
                fix=f"give {axis} a number",
            )
        degrees[axis] = degree
    if list(degrees.values()).count(-1) > 1:
        several = [axis for axis, degree in degrees.items() if degree == -1]
        raise LayoutError(
            f"layout {value!r}: -1 for {' and '.join(several)}",
            why="only one axis can take whatever ranks are left",
            fix=f"give {several[0]} a number",
        )
    for axis, degree in degrees.items():
        if axis not in axes and degree != 1:
            raise UnsupportedError(
                f"layout {_text_of(degrees)!r}: {axis}={degree}",
                why=f"{axis} is a planned axis; its technique does not exist yet",
                fix=f"{axis_answer(axis) or f'leave {axis} out'}; axes that work: {', '.join(axis for axis in GIVEN_AXES if axis in axes)}",
            )
    return degrees


def _text_of(degrees: Mapping[str, int | str]) -> str:
    return ",".join(f"{axis}={degree}" for axis, degree in degrees.items())


def _pairs(text: str) -> Iterator[tuple[str, int | str]]:
    for item in filter(None, (part.strip() for part in text.split(","))):
        axis, equals, degree = (part.strip() for part in item.partition("="))
        if equals and degree == NODE:
            yield axis, NODE
            continue
        if not equals or not degree.lstrip("-").isdigit():
            raise LayoutError(
                f"layout {text!r}: {item!r}",
                why="a layout is a list of axis=degree, with whole numbers, or dp_shard=node",
                fix=f"write it like {_EXAMPLE}",
            )
        yield axis, int(degree)


def _node_size(text: str, num_ranks: int, given: int | Callable[[], int] | None) -> int:
    size = given() if callable(given) else given
    if size is None:
        raise LayoutError(
            f"layout {text!r}",
            why="how many ranks a node has is not known here",
            fix='give the number in place of node: "dp_replicate=-1,dp_shard=8"',
        )
    if num_ranks % size:
        raise LayoutError(
            f"layout {text!r} on {num_ranks} ranks, {size} of them on this node",
            why=f"{size} does not divide {num_ranks}, so nodes have different numbers of ranks, and a shard group of each node "
            "would have another size",
            fix="start as many ranks on every node, or give dp_shard a number that divides those of all nodes",
        )
    return size


def _refuse_carved(layout: Layout, axis: str, degree: int, given: str) -> None:
    of = CARVED[axis][0]
    size = layout.degree(of)
    if size % degree:
        fits = [n for n in range(2, size + 1) if size % n == 0]
        raise LayoutError(
            f"{given}: {axis}={degree}",
            why=f"{axis} takes neighbours along {of}, of which {layout.text_of(of)} gives {size}",
            fix=f"use {axis}={' or '.join(map(str, fits))}, or leave it out" if fits else f"leave {axis} out",
        )


def _infer(degrees: dict[str, int], num_ranks: int, given: str) -> dict[str, int]:
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    free = next((axis for axis, degree in degrees.items() if degree == -1), None)
    if free is not None and num_ranks % fixed == 0:
        return {**degrees, free: num_ranks // fixed}
    if free is None and fixed == num_ranks:
        return degrees
    ranks = f"{num_ranks} rank" + ("s" if num_ranks != 1 else "")
    why = (
        f"the degrees given multiply to {fixed}, which does not divide {num_ranks}"
        if free
        else f"the degrees multiply to {fixed}, and every one of the {num_ranks} ranks needs exactly one place"
    )
    options = " or ".join(f'"{layout}"' for layout in _nearest(degrees, num_ranks))
    raise LayoutError(
        given, why=why, fix=f"on {ranks} use {options}" + (f", or start {fixed} ranks" if not free else "")
    )


def _nearest(degrees: dict[str, int], num_ranks: int) -> list[Layout]:
    """Up to three layouts of ``num_ranks`` ranks closest to the requested degrees; data-parallel degrees change first,
    the others stay if they can; where a single one cannot, the largest degree of it that fits is offered too."""

    def distance(layout: Layout) -> float:
        asked = (abs(math.log(layout.degrees[a] / max(d, 1))) for a, d in degrees.items() if a not in others and d > 0)
        return sum(asked) + 0.01 * math.log(layout.dp_replicate)

    others = {axis: d for axis, d in degrees.items() if axis not in DERIVED_AXES["dp"] and d > 1}
    smaller: list[Layout] = []
    if num_ranks % math.prod(others.values()):
        if len(others) == 1 and (fitting := [d for d in range(2, max(others.values())) if num_ranks % d == 0]):
            smaller = [Layout(dp_shard=num_ranks // fitting[-1], **dict.fromkeys(others, fitting[-1]))]
        others = {}
    rest = num_ranks // math.prod(others.values())
    divisors = [d for d in range(1, rest + 1) if rest % d == 0]
    options = [Layout(dp_replicate=d, dp_shard=rest // d, **others) for d in divisors]
    return [*sorted(options, key=distance)[: 3 - len(smaller)], *smaller]


def _unknown_axis(axis: str, degree: int | str | None = None, axes: Collection[str] = GIVEN_AXES) -> LayoutError:
    """The error about an axis that no layout has; with a ``degree``, it was written in a layout."""
    known = [name for name in GIVEN_AXES if name in axes]
    fix = axis_answer(str(axis), degree) if degree is not None else None
    close = closest(str(axis), known)
    return LayoutError(
        f"axis {axis!r}",
        why=f"the mesh axes are {', '.join(known)}",
        fix=fix or (f"did you mean {close!r}? " if close else "") + f"write a layout like {_EXAMPLE}",
    )
