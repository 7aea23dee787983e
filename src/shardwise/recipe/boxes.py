"""Boxes of a tensor: where they meet, and in which runs of bytes they lie in a file. Torch-free.

A box is ``(starts, sizes)``, in elements, one entry per dim.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Box", "blocks", "common", "index_of", "row_strides", "run_length", "runs", "whole"]


class Box(NamedTuple):
    """A part of a tensor: ``sizes`` elements per dim, from ``starts`` on."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def within(self, outer: "Box") -> "Box":
        """The same box, counted from the beginning of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.sizes)


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def common(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    starts = tuple(map(max, a.starts, b.starts))
    ends = (min(s + n, t + m) for s, n, t, m in zip(a.starts, a.sizes, b.starts, b.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def index_of(box: Box) -> tuple[slice, ...]:
    """Index of the box into a tensor."""
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


@functools.lru_cache(maxsize=4096)
def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor of ``shape``."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """``(offset, length)``, in elements, of the stretches in which ``box`` lies in a row-major tensor of ``shape``, in the
    order of the box's own elements; as long as they can be."""
    if not box.numel:
        return
    strides, inner, length = row_strides(shape), _dim_of_runs(box, shape), run_length(box, shape)
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    for steps in itertools.product(*(range(size) for size in box.sizes[:inner])):
        yield first + sum(step * stride for step, stride in zip(steps, strides, strict=False)), length


def run_length(box: Box, shape: tuple[int, ...]) -> int:
    """Length, in elements, of each of those stretches."""
    return math.prod(box.sizes[_dim_of_runs(box, shape) :])


def _dim_of_runs(box: Box, shape: tuple[int, ...]) -> int:
    """The dim along which a run goes; all of those after it are covered whole."""
    dim = len(shape)
    while dim and box.sizes[dim - 1] == shape[dim - 1]:  # it continues in the next row
        dim -= 1
    return max(dim - 1, 0)


def blocks(box: Box, max_numel: int) -> Iterator[Box]:
    """``box`` in pieces of at most ``max_numel`` elements (at least one), in the order of its elements."""
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
