"""The plan of the files of a conversion, made before anything is written, so that writing is only copying."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box
from shardwise.state.integrity.sums import Sums


class Fact(NamedTuple):
    """The shape and dtype of a tensor in the written file."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Piece:
    """A part to be copied: ``box`` of tensor ``name``, row-major and in ``dtype``, to ``offset`` of ``file``."""

    name: str
    box: Box
    dtype: str
    file: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.box.numel * DTYPE_BYTES[self.dtype]


class Fixed(NamedTuple):
    """Bytes to be written that are not tensor values: headers, indices."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class ConversionPlan:
    """All files that a conversion writes.

    Attributes:
        files: name -> size in bytes.
        pieces: the parts to copy, in the order of the files.
        finish: returns everything else in the files, from the checksums of the pieces in their order.
        summed: whether ``finish`` needs the checksums; otherwise it gets zeros.
        manifest: returns the file that is written last, from the sizes of all files and the checksums of their content.
    """

    files: Mapping[str, int]
    pieces: tuple[Piece, ...]
    finish: Callable[[Sequence[int]], list[Fixed]]
    summed: bool = False
    manifest: Callable[[Mapping[str, int], Sums], Fixed] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())
