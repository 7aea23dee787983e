"""Stored tensors of which other rows are loaded or written: in another order (rotary embeddings), or more of them (a vocabulary
that has grown)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.recipe.boxes import Box
from shardwise.state.files import OpenFiles
from shardwise.state.rounding import copy_checked
from shardwise.state.stored import Chunk, TensorSource, is_rounded

_ROWS = 256  # rows that are added up at a time: a power of two

Columns = tuple[tuple[int, ...], tuple[int, ...]]  # starts and sizes of a box without its first dim


@dataclass(frozen=True, eq=False)
class GrownTable(TensorSource):
    """A stored tensor with rows added at its end: each of them is the mean of the stored ones.

    The mean is computed in float64, by additions of whole rows in an order that depends on nothing but their number. So
    every element of it has the same bits whichever columns a rank reads, on any number of threads. A rank reads the table
    for it only if it holds an added row, and only the columns that it holds, a block of rows at a time.
    """

    table: TensorSource
    _means: dict[Columns, Tensor] = field(default_factory=dict, repr=False)

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return self.table.origins

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        first, num = box.starts[0], box.sizes[0]
        known = max(0, min(num, self.table.shape[0] - first))
        if known:
            self.table.read(Box(box.starts, (known, *box.sizes[1:])), out[:known], files)
        if known < num and box.numel:
            mean = self._mean((box.starts[1:], box.sizes[1:]), files)
            copy_checked(out[known:], mean.expand(num - known, *mean.shape), "the mean of the rows that are stored")

    def _mean(self, columns: Columns, files: OpenFiles) -> Tensor:
        """The mean of the stored rows, float64, of some columns."""
        if columns not in self._means:
            starts, sizes = columns
            num_rows = self.table.shape[0]
            total = torch.zeros(sizes, dtype=torch.float64)
            for row in range(0, num_rows, _ROWS):
                num = min(_ROWS, num_rows - row)
                part = torch.zeros(_ROWS, *sizes, dtype=torch.float64)
                self.table.read(Box((row, *starts), (num, *sizes)), part[:num], files)
                while len(part) > 1:  # not sum(): its order depends on the width and on the number of threads
                    part = part[: len(part) // 2] + part[len(part) // 2 :]
                total += part[0]
            self._means[columns] = total / num_rows
        return self._means[columns]


def with_added_rows(stored: TensorSource, shape: tuple[int, ...], rows: tuple[int, int] | None) -> TensorSource:
    """``stored`` with the rows that ``shape``, the model's, has more; itself where it is no table of a vocabulary that has grown.

    Args:
        rows: of the vocabulary, as stored and in the model; None: it has not grown.
    """
    fits = rows is not None and (stored.shape[:1], shape[:1]) == ((rows[0],), (rows[1],))
    if not fits or stored.shape[1:] != shape[1:] or not is_rounded(stored.dtype):
        return stored
    return GrownTable(shape, stored.dtype, stored)


@dataclass(frozen=True, eq=False)
class Reordered(TensorSource):
    """A tensor with the rows of ``inner`` reordered within each of ``heads`` equal parts: rotary embeddings store the
    two elements of a pair either in two halves or next to each other."""

    inner: TensorSource
    heads: int
    to_pairs: bool

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return self.inner.origins

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        rows = self.shape[0] // self.heads
        end = box.starts[0] + box.sizes[0]
        for head in range(box.starts[0] // rows, -(-end // rows)):
            # One head at a time: its rows can come from anywhere in it, and a head is small.
            whole_head = Box((head * rows, *box.starts[1:]), (rows, *box.sizes[1:]))
            halves = self.inner.load(files, whole_head)
            grid = (2, rows // 2) if self.to_pairs else (rows // 2, 2)
            ordered = halves.view(*grid, *box.sizes[1:]).transpose(0, 1).reshape(whole_head.sizes)
            first, last = max(box.starts[0], head * rows), min(end, (head + 1) * rows)
            out[first - box.starts[0] : last - box.starts[0]] = ordered[first - head * rows : last - head * rows]
