"""Boxes (rectangular regions) of a tensor: intersections, and the byte runs they cover in a file. Torch-free.

A box is ``(starts, sizes)``, in elements, one entry per dim.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular region of a tensor: ``sizes`` elements per dim, starting at ``starts``."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def within(self, outer: "Box") -> "Box":
        """The same box, relative to the start of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.sizes)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers a whole tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def common(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    starts = tuple(map(max, a.starts, b.starts))
    ends = (min(s + n, t + m) for s, n, t, m in zip(a.starts, a.sizes, b.starts, b.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def index_of(box: Box) -> tuple[slice, ...]:
    """The index that selects the box from a tensor."""
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


@functools.lru_cache(maxsize=4096)
def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor of ``shape``."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """``(offset, length)``, in elements, of each contiguous run that ``box`` covers in a row-major tensor of ``shape``,
    in the order of the box's own elements. Runs are as long as possible."""
    if not box.numel:
        return
    strides, inner, length = row_strides(shape), _dim_of_runs(box, shape), run_length(box, shape)
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    for steps in itertools.product(*(range(size) for size in box.sizes[:inner])):
        yield first + sum(step * stride for step, stride in zip(steps, strides, strict=False)), length


def run_length(box: Box, shape: tuple[int, ...]) -> int:
    """Length, in elements, of each run that :func:`runs` yields."""
    return math.prod(box.sizes[_dim_of_runs(box, shape) :])


def _dim_of_runs(box: Box, shape: tuple[int, ...]) -> int:
    """The dim along which a run extends; every later dim is covered completely."""
    dim = len(shape)
    while dim and box.sizes[dim - 1] == shape[dim - 1]:  # it continues in the next row
        dim -= 1
    return max(dim - 1, 0)


def blocks(box: Box, max_numel: int) -> Iterator[Box]:
    """Splits ``box`` into boxes of at most ``max_numel`` elements (at least one), in the order of its elements."""
    if box.numel <= max(max_numel, 1):
        if box.numel:
            yield box
        return
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    step = max(1, max_numel // max(1, math.prod(box.sizes[dim + 1 :])))
    for start in range(0, box.sizes[dim], step):
        starts, sizes = list(box.starts), list(box.sizes)
        starts[dim], sizes[dim] = box.starts[dim] + start, min(step, box.sizes[dim] - start)
        yield from blocks(Box(tuple(starts), tuple(sizes)), max_numel)
