"""Which bytes of a parameter a rank holds (:func:`extents`), and which ranks hold the same ones (:func:`owners`).

These two functions are the only place with that rule; init, norms, state, comparison and planning call them. A dim is
represented as a list of intervals of the full tensor, in the order in which they lie in the local tensor; each cut
keeps a sub-range of that list. So a dim can be cut twice (by tp, then by fsdp), in several parts (fused q|k|v),
unevenly, and with parts that neighbouring ranks hold whole.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwise.layout import AXES, DERIVED_AXES, Coord, Layout, mesh_axes
from shardwise.recipe.boxes import Box, blocks, whole
from shardwise.recipe.records import Cut, Param, Part

Intervals = tuple[tuple[int, int], ...]  # (start in the full dim, length), in local order


@dataclass(frozen=True, order=True)
class Slice:
    """A box of the full tensor and its position in the local tensor; all in elements, one entry per dim."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    local_starts: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box in the full tensor."""
        return Box(self.starts, self.sizes)

    @property
    def full_index(self) -> tuple[slice, ...]:
        """The index that selects it from the full tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.starts, self.sizes, strict=True))

    @property
    def local_index(self) -> tuple[slice, ...]:
        """The index that selects it from the local tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.local_starts, self.sizes, strict=True))

    def blocks(self, max_numel: int) -> Iterator["Slice"]:
        """Splits it into slices of at most ``max_numel`` elements (at least one), in the order of its elements."""
        for part in blocks(whole(self.sizes), max_numel):
            starts, local_starts = (
                tuple(a + b for a, b in zip(place, part.starts, strict=True))
                for place in (self.starts, self.local_starts)
            )
            yield Slice(starts, part.sizes, local_starts)


def extents(param: Param, coord: Coord) -> tuple[Slice, ...]:
    """The pieces of ``param`` that the rank at ``coord`` holds, in local order; none if its shard is empty.

    Over all ranks the pieces tile the tensor, if a piece with several :func:`owners` is counted once.
    """
    return _extents(param.shape, param.cuts, coord.layout, _cut_indices(param.cuts, coord))


def owners(param: Param, coord: Coord) -> tuple[tuple[int, ...], ...]:
    """For each piece of :func:`extents`, all ranks that hold the same piece, ascending (this rank included)."""
    return tuple(_owners(param.shape, param.cuts, coord, piece) for piece in extents(param, coord))


def local_shape(param: Param, coord: Coord) -> tuple[int, ...]:
    """Shape of the local tensor of ``param`` at ``coord``."""
    dims = _dim_intervals(param.shape, param.cuts, coord.layout, _cut_indices(param.cuts, coord))
    return tuple(sum(length for _, length in intervals) for intervals in dims)


def num_chunks(part: Part, degree: int) -> int:
    """The number of pieces into which ``part`` is cut over an axis of ``degree`` ranks."""
    return degree // part.replicas


def _cut_indices(cuts: tuple[Cut, ...], coord: Coord) -> tuple[int, ...]:
    return tuple(coord.index(cut.axis) for cut in cuts)


@lru_cache(maxsize=65536)
def _extents(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], layout: Layout, indices: tuple[int, ...]
) -> tuple[Slice, ...]:
    pieces = []
    for box in itertools.product(*map(_with_local_starts, _dim_intervals(shape, cuts, layout, indices))):
        starts, sizes, local_starts = zip(*box, strict=True) if box else ((), (), ())
        if 0 not in sizes:
            pieces.append(Slice(tuple(starts), tuple(sizes), tuple(local_starts)))
    return tuple(pieces)


def _with_local_starts(intervals: Intervals) -> list[tuple[int, int, int]]:
    offsets = itertools.accumulate((length for _, length in intervals), initial=0)
    return [(start, length, offset) for (start, length), offset in zip(intervals, offsets, strict=False)]


def _dim_intervals(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], layout: Layout, indices: tuple[int, ...]
) -> list[Intervals]:
    dims: list[Intervals] = [((0, size),) for size in shape]
    for cut, index in zip(cuts, indices, strict=True):
        dims[cut.dim] = _cut_intervals(dims[cut.dim], cut, layout.degree(cut.axis), index)
    return dims


def _cut_intervals(intervals: Intervals, cut: Cut, degree: int, index: int) -> Intervals:
    if cut.holder is not None:
        return intervals if index == cut.holder else ()
    total = sum(length for _, length in intervals)
    kept: list[tuple[int, int]] = []
    offset = 0
    for part in cut.parts or (Part(size=total),):
        chunks = num_chunks(part, degree)
        chunk = -(-part.size // chunks)
        low = min(index // part.replicas * chunk, part.size)
        high = min(low + chunk, part.size)
        kept += _sub_range(intervals, offset + low, offset + high)
        offset += part.size
    return tuple(kept)


def _sub_range(intervals: Intervals, low: int, high: int) -> list[tuple[int, int]]:
    """Positions ``low`` to ``high`` of the local order, as intervals of the full dim."""
    found, offset = [], 0
    for start, length in intervals:
        a, b = max(low, offset), min(high, offset + length)
        if a < b:
            found.append((start + a - offset, b - a))
        offset += length
    return found


@lru_cache(maxsize=65536)
def _owners(shape: tuple[int, ...], cuts: tuple[Cut, ...], coord: Coord, piece: Slice) -> tuple[int, ...]:
    """Ranks whose extents hold ``piece``. Checks only ranks that can: those with the same index on every cut axis, or
    with any index where a part is shared by neighbours, and with any index on the other axes."""
    layout = coord.layout
    options = {axis: tuple(range(layout.degrees[axis])) for axis in AXES}
    for cut in cuts:
        # Of a carved axis ranks with other mesh coordinates have the same index.
        if all(part.replicas == 1 for part in cut.parts) and cut.axis in (*AXES, *DERIVED_AXES):
            for axis in mesh_axes(cut.axis):
                options[axis] = (coord.indices[AXES.index(axis)],)
    wanted = (piece.starts, piece.sizes)
    ranks = []
    for cell in itertools.product(*options.values()):
        rank = layout.rank_at(dict(zip(AXES, cell, strict=True)))
        held = _extents(shape, cuts, layout, _cut_indices(cuts, layout.coord(rank)))
        if any((other.starts, other.sizes) == wanted for other in held):
            ranks.append(rank)
    return tuple(ranks)
