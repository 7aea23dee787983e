"""The plan of the files that weights are written to: made before the first byte, so that writing is nothing but
copying."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box
from shardwise.state.integrity.sums import Sums

__all__ = ["ConversionPlan", "Fact", "Fixed", "Piece"]


class Fact(NamedTuple):
    """What a tensor will be in the file."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Piece:
    """``box`` of tensor ``name`` goes, row-major and in ``dtype``, to ``offset`` of ``file``."""

    name: str
    box: Box
    dtype: str
    file: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.box.numel * DTYPE_BYTES[self.dtype]


class Fixed(NamedTuple):
    """Bytes that are no values: headers, lists of what is where."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class ConversionPlan:
    """All files of a target.

    Attributes:
        files: name -> size in bytes.
        pieces: what is copied, in the order of the files.
        finish: from the checksums of the pieces, in their order, everything else that the files hold.
        summed: whether ``finish`` needs them; else it is given zeros.
        manifest: from the size of every file and the checksums of what was written to it, the file that is written
            last.
    """

    files: Mapping[str, int]
    pieces: tuple[Piece, ...]
    finish: Callable[[Sequence[int]], list[Fixed]]
    summed: bool = False
    manifest: Callable[[Mapping[str, int], Sums], Fixed] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())
