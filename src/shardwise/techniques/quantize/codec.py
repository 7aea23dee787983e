"""How packed weights are made of plain values and read as such, a rank's part at a time: what loading and saving ask."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.model import dtype_of
from shardwise.model.nf4 import Packing, add_maxima, codes_of, pack_rows, second_stage, unpack
from shardwise.recipe import Recipe, Slice, extents, owners
from shardwise.recipe.boxes import Box
from shardwise.techniques.quantize import bitsandbytes
from shardwise.techniques.technique import StoredPart, Whole

ROLES = ("codes", "scales", "outer", "mean")


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One weight in 4 bits, as a :class:`~shardwise.techniques.technique.PackedTensor`.

    Attributes:
        name: of the weight.
        recipe: that cuts its parts.
        rank: this rank.
        codes, scales: the parameters that hold its bytes.
    """

    name: str
    recipe: Recipe
    rank: int
    codes: str
    scales: str
    kind: str = "nf4"

    @property
    def parts(self) -> Mapping[str, str]:
        """Role -> canonical name."""
        return dict(zip(ROLES, (self.codes, self.scales, f"{self.codes}_outer", f"{self.codes}_mean"), strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        codec = self.recipe.params[self.codes].codec
        assert codec is not None
        return codec.shape

    @property
    def dtype(self) -> str:
        codec = self.recipe.params[self.codes].codec
        assert codec is not None
        return codec.dtype

    def pieces(self, rank: int) -> list[tuple[Slice, tuple[int, ...]]]:
        """The pieces of the weight that a rank has, each with all ranks that have it."""
        param, coord = self.recipe.params[self.codes], self.recipe.grid.coord(rank)
        found = []
        for piece, holders in zip(extents(param, coord), owners(param, coord), strict=True):
            (row, first), (rows, num), (local_row, local_first) = piece.starts, piece.sizes, piece.local_starts
            num = min(2 * num, self.shape[1] - 2 * first)
            found.append((Slice((row, 2 * first), (rows, num), (local_row, 2 * local_first)), holders))
        return found

    # ---- plain -> packed -------------------------------------------------------------------------------------

    def measure(self, read: Callable[[Box], Tensor], local: Mapping[str, Tensor], place: str) -> Tensor:
        maxima = torch.zeros(self._all.num_blocks, dtype=torch.float32)
        for at, values, packing, codes in self._read(read, local, place):
            add_maxima(maxima, values, packing, at)
            if packing.is_aligned:  # its blocks are here, within rows: the codes are known
                codes.copy_(codes_of(values, maxima, packing, at))
        return maxima

    def encode(self, read: Callable[[Box], Tensor], local: Mapping[str, Tensor], maxima: Tensor, place: str) -> None:
        for at, values, packing, codes in self._read(read, local, place, is_aligned=False):
            codes.copy_(codes_of(values, maxima, packing, at))
        scales, outer, mean = second_stage(maxima)
        scales = scales.view(self._all.scales_shape)
        for piece in extents(self.recipe.params[self.scales], self.recipe.grid.coord(self.rank)):
            local[self.scales][piece.local_index].copy_(scales[piece.full_index])
        local[self.parts["outer"]].copy_(outer)
        local[self.parts["mean"]].copy_(mean)

    def encode_whole(self, read: Callable[[Box], Tensor], place: str) -> dict[str, Tensor]:
        values = pack_rows(self._all, lambda row, number: self._values(read, row, number, self._all, place))
        return dict(zip(self.parts.values(), values, strict=True))

    @cached_property
    def _all(self) -> Packing:
        return Packing.of((self.shape[0], self.shape[1]))

    def _packing(self, piece: Slice) -> Packing:
        return Packing(self._all.shape, ((piece.starts[0], piece.sizes[0]),), piece.starts[1], piece.sizes[1])

    def _codes(self, piece: Slice, codes: Tensor) -> Tensor:
        """The bytes of a piece, of what this rank has of all."""
        (row, first), (rows, num) = piece.local_starts, piece.sizes
        return codes[row : row + rows, first // 2 : first // 2 + -(-num // 2)]

    def _read(
        self, read: Callable[[Box], Tensor], local: Mapping[str, Tensor], place: str, is_aligned: bool | None = None
    ) -> Iterator[tuple[int, Tensor, Packing, Tensor]]:
        """Of bounded pieces: its row in the whole, values, the packing that it is of, its bytes here."""
        for piece, _ in self.pieces(self.rank):
            packing, codes = self._packing(piece), self._codes(piece, local[self.codes])
            if is_aligned is not None and packing.is_aligned != is_aligned:
                continue
            for here, at, number in packing.pieces():
                values = self._values(read, at, number, packing, place)
                yield at, values, packing, codes[here : here + number]

    def _values(self, read: Callable[[Box], Tensor], row: int, number: int, packing: Packing, place: str) -> Tensor:
        values = read(Box((row, packing.first), (number, packing.num_inputs))).float()
        if values.numel() and not torch.isfinite(values.abs().max()):
            num = values.numel() - int(torch.isfinite(values).sum())
            raise CheckpointError(
                f"{place}: {num} numbers in rows {row} to {row + number - 1} that are NaN or infinite in float32",
                why="the weight is stored in 4 bits, and a block of 64 relative to its largest number",
                fix="load weights of an earlier step, or keep this weight plain: Quantize(keep=(...))",
                name=self.name,
            )
        return values

    # ---- packed -> plain -------------------------------------------------------------------------------------

    def decode(self, values: Mapping[str, Tensor]) -> Tensor:
        codes, scales, outer, mean = (values[name].cpu() for name in self.parts.values())
        return unpack(codes, scales, outer, mean, self._all, dtype_of(self.dtype))

    def values_here(self, whole: Whole, local: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        scales = whole([self.scales], _as_it_is).view(-1)
        blocks = [self._span(self._packing(piece)) for piece, _ in self.pieces(self.rank)]
        first, last = min((a for a, _ in blocks), default=0), max((b for _, b in blocks), default=0)
        return partial(self._here, local, first, scales[first:last].clone())

    def _span(self, packing: Packing) -> tuple[int, int]:
        """The first block of what is here, and the one after the last."""
        ((row, number),), num = packing.rows, self.shape[1]
        last = (row + number - 1) * num + packing.first + packing.num_inputs - 1
        return int(packing.blocks_of(row, 1)[0, 0]), last // 64 + 1

    def _here(self, local: Mapping[str, Tensor], first: int, needed: Tensor) -> Tensor:
        pieces = [piece for piece, _ in self.pieces(self.rank)]
        ends = [[a + n for a, n in zip(piece.local_starts, piece.sizes, strict=True)] for piece in pieces]
        out = torch.empty([max(end) for end in zip(*ends, strict=True)] or [0, 0], dtype=dtype_of(self.dtype))
        scales = torch.zeros(self._all.num_blocks, dtype=torch.uint8)  # others are not asked for
        scales[first : first + len(needed)] = needed
        codes, outer, mean = (local[self.parts[role]].cpu() for role in ("codes", "outer", "mean"))
        for piece in pieces:
            out[piece.local_index] = unpack(
                self._codes(piece, codes), scales, outer, mean, self._packing(piece), out.dtype
            )
        return out

    def stored(self, local: Mapping[str, Tensor]) -> dict[str, StoredPart]:
        return bitsandbytes.stored(self.name, self.parts, self.shape, self.dtype, float(local[self.parts["mean"]]))


def codecs_of(recipe: Recipe, rank: int) -> dict[str, PackedWeight]:
    """Weight -> how it is stored, of all packed weights of a recipe."""
    parts: dict[str, dict[str, Any]] = {}
    for name, param in recipe.params.items():
        if param.codec is not None and param.codec.kind == "nf4":
            parts.setdefault(param.codec.of, {})[param.codec.part] = name
    return {of: PackedWeight(of, recipe, rank, names["codes"], names["scales"]) for of, names in parts.items()}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
