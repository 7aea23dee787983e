"""NF4: weights in 4 bits, in the format of bitsandbytes, as plain byte tensors (QLoRA, https://arxiv.org/abs/2305.14314).

Numbers of a weight ``[out, in]`` are taken in flat order, in blocks of 64, the last one short. Of a block the largest magnitude ``a`` is kept, and
of each number the nearest of 16 values of ``w / a``: a code of 4 bits. The magnitudes of all blocks, less their mean, are kept in 8 bits in groups
of 256, each with its own largest magnitude: the *second stage*. A value is ``table[code] x scale``, computed in float32 and rounded once. Codes
need their own block alone; the second stage needs the magnitudes of all blocks of the tensor. No bit depends on threads, or on how a tensor is cut.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

BLOCK, GROUP = 64, 256
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values, of code 0 to 15: quantiles of a normal distribution."""

_CHUNK = 1 << 18  # numbers at a time: all temporaries are so long
_UNPACKED = 1 << 19  # of an unpacking, whose temporaries are fewer: each chunk costs 20 us beside its numbers
_CELLS = 1024  # of [-1, 1], in each of which at most one bound between two codes lies


@dataclass(frozen=True)
class Packing:
    """What of a packed weight is here: all of it, or some rows, or some inputs of all rows.

    Attributes:
        shape: ``(out, in)`` of the whole weight.
        rows: start and number of each run of rows that is here, in order.
        first: the first input that is here; an even number.
        num_inputs: how many are here.
    """

    shape: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    first: int
    num_inputs: int

    @classmethod
    def of(cls, shape: tuple[int, int]) -> "Packing":
        """Of all of a weight of this shape."""
        return cls(shape, ((0, shape[0]),), 0, shape[1])

    @property
    def num_blocks(self) -> int:
        return -(-self.shape[0] * self.shape[1] // BLOCK)

    @property
    def codes_shape(self) -> tuple[int, int]:
        """Shape of the bytes that are here, two codes in each; in a row of an odd number half a byte is filling."""
        return sum(number for _, number in self.rows), -(-self.num_inputs // 2)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the codes of all scales."""
        out, num = self.shape
        return (out, num // BLOCK) if num % BLOCK == 0 else (self.num_blocks,)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """``(row here, row of the whole, number)`` of bounded pieces of rows."""
        most, here = max(1, _CHUNK // max(self.num_inputs, 1)), 0
        for start, number in self.rows:
            for at in range(0, number, most):
                yield here + at, start + at, min(most, number - at)
            here += number

    def blocks_of(self, row: int, number: int) -> Tensor:
        """The block of each number of some rows, ``[number, inputs here]``."""
        inputs = torch.arange(self.first, self.first + self.num_inputs, device="cpu")
        return (torch.arange(row, row + number, device="cpu")[:, None] * self.shape[1] + inputs).div_(
            BLOCK, rounding_mode="floor"
        )

    @property
    def is_aligned(self) -> bool:
        """Whether all blocks lie within one row, and all those that are touched are here."""
        return self.shape[1] % BLOCK == 0 and self.first % BLOCK == 0 and self.num_inputs % BLOCK == 0


# ---- tables ------------------------------------------------------------------------------------------------------------


def dynamic_map() -> list[float]:
    """The 256 values of bitsandbytes' signed map of 8 bits, ascending: of the second stage."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        middle = (10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middle + [-x for x in middle]
    return sorted(values)


@functools.cache
def _on(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The values of codes, of two codes of a byte, and of scale codes, on a device."""
    table = torch.tensor(TABLE, dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    both = torch.stack([table[byte >> 4], table[byte & 15]], 1)
    return (
        table.to(device),
        both.view(torch.int64).view(-1).to(device),
        torch.tensor(dynamic_map(), dtype=torch.float32, device="cpu").to(device),
    )


@functools.cache
def _cells() -> tuple[Tensor, Tensor]:
    """Of each cell: the code at its lower edge, and the bound in it: six times as fast as ``torch.bucketize``."""
    table = torch.tensor(TABLE, dtype=torch.float32, device="cpu")
    bounds = (table[:-1] + table[1:]) / 2
    edges = torch.arange(_CELLS + 2, dtype=torch.float32, device="cpu") / (_CELLS / 2) - 1
    limit = torch.full((_CELLS + 2,), float("inf"), dtype=torch.float32, device="cpu")
    limit[((bounds.double() + 1) * (_CELLS / 2)).long()] = bounds
    return torch.bucketize(edges, bounds, right=True).to(torch.uint8), limit


# ---- packing -----------------------------------------------------------------------------------------------------------


def add_maxima(maxima: Tensor, values: Tensor, packing: Packing, row: int) -> None:
    """Raises ``maxima [blocks]`` to the largest magnitudes of ``values [rows, inputs here]``, of rows from ``row`` on."""
    magnitudes = values.detach().float().abs()
    if packing.is_aligned:
        per_row, here = packing.shape[1] // BLOCK, packing.num_inputs // BLOCK
        there = maxima.view(packing.shape[0], per_row)[row : row + len(values), packing.first // BLOCK :][:, :here]
        torch.maximum(there, magnitudes.view(len(values), here, BLOCK).amax(2), out=there)
        return
    blocks = packing.blocks_of(row, len(values)).flatten()
    maxima.scatter_reduce_(0, blocks, magnitudes.flatten(), "amax")


def codes_of(values: Tensor, maxima: Tensor, packing: Packing, row: int) -> Tensor:
    """The bytes of ``values [rows, inputs here]``, given the largest magnitudes of the blocks that they are in."""
    values = values.detach().float()
    if not values.numel():
        return torch.empty((len(values), 0), dtype=torch.uint8)
    if packing.is_aligned:
        per_row, here = packing.shape[1] // BLOCK, packing.num_inputs // BLOCK
        there = maxima.view(packing.shape[0], per_row)[row : row + len(values), packing.first // BLOCK :][:, :here]
        inverse = 1.0 / there.clamp(min=1e-38)
        scaled = (values.view(len(values), here, BLOCK) * inverse[..., None]).view(len(values), -1)
    else:
        blocks = packing.blocks_of(row, len(values))
        first_block, last_block = int(blocks.flatten()[0]), int(blocks.flatten()[-1])
        inverse = 1.0 / maxima[first_block : last_block + 1].clamp(min=1e-38)
        scaled = values * inverse[blocks - first_block]
    first, limit = _cells()
    scaled = scaled.clamp_(-1, 1)
    cell = torch.add(scaled, 1).mul_(_CELLS / 2).int().view(-1)
    index = torch.index_select(first, 0, cell)
    index += scaled.view(-1) > torch.index_select(limit, 0, cell)
    index = functional.pad(index.view(len(values), -1), (0, values.shape[1] % 2))
    return torch.bitwise_or(index[:, ::2] << 4, index[:, 1::2])


def second_stage(maxima: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale codes ``[blocks]``, the largest magnitude of each group, and the mean, of the largest magnitudes of all blocks."""
    mean = maxima.double().mean().float()
    left = maxima - mean
    groups = functional.pad(left, (0, -left.numel() % GROUP)).view(-1, GROUP)
    outer = groups.abs().amax(1)
    device = None if maxima.is_meta else maxima.device  # on meta a tape records what is given as numbers
    values = torch.tensor(dynamic_map(), dtype=torch.float32, device=device)
    relative = torch.where(outer[:, None] == 0, 0.0, groups / outer[:, None])
    codes = torch.bucketize(relative, (values[1:] + values[:-1]) / 2)
    return codes.to(torch.uint8).view(-1)[: left.numel()], outer, mean


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scale codes, outer and mean of a whole weight ``[out, in]``. On meta in operations that a tape can record."""
    packing = Packing.of((weight.shape[0], weight.shape[1]))
    if weight.is_meta:
        blocks = functional.pad(weight.float().view(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
        maxima = blocks.abs().amax(1)
        table = torch.tensor(TABLE, dtype=torch.float32)
        scaled = (blocks * (1.0 / maxima.clamp(min=1e-38))[:, None]).clamp(-1, 1)
        index = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2).view(-1)[: weight.numel()].view(weight.shape)
        index = functional.pad(index, (0, weight.shape[1] % 2)).to(torch.uint8)
        codes = torch.bitwise_or(index[:, ::2] * 16, index[:, 1::2])
        scales, outer, mean = second_stage(maxima)
        return codes, scales.view(packing.scales_shape), outer, mean
    host = weight.detach().cpu()
    found = pack_rows(packing, lambda row, number: host[row : row + number])
    return tuple(each.to(weight.device) for each in found)  # type: ignore[return-value]


def pack_rows(packing: Packing, read: Callable[[int, int], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of a whole weight, of which ``read(row, number)`` gives rows: once where blocks lie within them, else twice."""
    maxima = torch.zeros(packing.num_blocks, dtype=torch.float32, device="cpu")
    codes = torch.empty(packing.codes_shape, dtype=torch.uint8, device="cpu")
    for is_last in (False, True):
        for here, row, number in packing.pieces() if not (is_last and packing.is_aligned) else ():
            values = read(row, number)
            if not is_last:
                add_maxima(maxima, values, packing, row)
            if is_last or packing.is_aligned:
                codes[here : here + number] = codes_of(values, maxima, packing, row)
    scales, outer, mean = second_stage(maxima)
    return codes, scales.view(packing.scales_shape), outer, mean


# ---- unpacking ---------------------------------------------------------------------------------------------------------


def unpack(codes: Tensor, scales: Tensor, outer: Tensor, mean: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """The values ``[rows here, inputs here]`` of ``codes``, given all scale codes of the weight."""
    tensors = codes, scales, outer, mean
    if has_torch_function(tensors):  # one function to a mode, which may change what the lines below compute in
        return handle_torch_function(unpack, tensors, *tensors, packing, dtype)
    flat = [number for run in packing.rows for number in run]
    return _unpack(codes, scales, outer, mean, [*packing.shape], flat, packing.first, packing.num_inputs, dtype)


@torch.library.custom_op("shardwise::nf4_unpack", mutates_args=())
def _unpack(
    codes: Tensor,
    scales: Tensor,
    outer: Tensor,
    mean: Tensor,
    shape: list[int],
    rows: list[int],
    first: int,
    num_inputs: int,
    dtype: torch.dtype,
) -> Tensor:
    """One operator, so that a graph has no loops and no tables of it."""
    packing = Packing((shape[0], shape[1]), tuple(zip(rows[::2], rows[1::2], strict=True)), first, num_inputs)
    _, pairs, values = _on(codes.device)
    out = torch.empty((codes.shape[0], num_inputs), dtype=dtype, device=codes.device)
    most, here = max(1, _UNPACKED // max(num_inputs, 1)), 0
    index = torch.empty((min(most, len(codes)), codes.shape[1]), dtype=torch.int32, device=codes.device)
    both = torch.empty(index.shape, dtype=torch.int64, device=codes.device)
    for start, number in packing.rows if out.numel() else ():
        of_run = _scales_of(scales.view(-1), outer.float(), mean.float(), values, packing, start, number)
        for at in range(0, number, most):
            num = min(most, number - at)
            torch.index_select(pairs, 0, index[:num].copy_(codes[here : here + num]).view(-1), out=both[:num].view(-1))
            part, factor = both[:num].view(torch.float32)[:, :num_inputs], of_run(at, num)
            part = part.view(num, -1, BLOCK) if packing.is_aligned else part
            out[here : here + num] = part.mul_(factor).view(num, num_inputs)
            here += num
    return out


def _scales_of(
    scales: Tensor, outer: Tensor, mean: Tensor, values: Tensor, packing: Packing, start: int, number: int
) -> Callable[[int, int], Tensor]:
    """``(row of the run, number of rows) -> scales`` of some rows of a run, as their numbers are multiplied by them."""
    (_, width), first, num_inputs = packing.shape, packing.first, packing.num_inputs
    begin, end = start * width // BLOCK, -(-(start + number) * width // BLOCK)
    groups = outer[begin // GROUP : -(-end // GROUP), None].expand(-1, GROUP).reshape(-1)[begin % GROUP :]
    of_blocks = torch.index_select(values, 0, scales[begin:end].int()).mul_(groups[: end - begin]).add_(mean)

    def within_rows(at: int, num: int) -> Tensor:
        columns = slice(first // BLOCK, -(-(first + num_inputs) // BLOCK))
        found = of_blocks.view(number, -1)[at : at + num, columns, None]
        if packing.is_aligned:
            return found
        return found.expand(-1, -1, BLOCK).reshape(num, -1)[:, first % BLOCK :][:, :num_inputs]

    def across_rows(at: int, num: int) -> Tensor:
        flat = (start + at) * width
        found = of_blocks[flat // BLOCK - begin : -(-(flat + num * width) // BLOCK) - begin, None].expand(-1, BLOCK)
        return found.reshape(-1)[flat % BLOCK :][: num * width].view(num, width)[:, first : first + num_inputs]

    return within_rows if width % BLOCK == 0 else across_rows


@_unpack.register_fake
def _(codes, scales, outer, mean, shape, rows, first, num_inputs, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty((codes.shape[0], num_inputs), dtype=dtype)


class PackedProduct(torch.autograd.Function):
    """``x @ W.T`` of a weight in bytes, which is unpacked for the product alone: the backward keeps the bytes, which a unit may free and
    gather again, and no more than one plain weight lives at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packing: Packing, *packed: Tensor) -> Tensor:
        codes, scales, outer, mean = packed
        ctx.save_for_backward(codes, scales, outer, mean)
        ctx.packing = packing
        return functional.linear(x, unpack(codes, scales, outer, mean, packing, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        codes, scales, outer, mean = ctx.saved_tensors
        return grad @ unpack(codes, scales, outer, mean, ctx.packing, grad.dtype), None, None, None, None, None
