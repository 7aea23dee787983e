"""What ranks along ``cp`` exchange, as autograd functions: rows of a sequence are gathered, or change places with heads, and gradients go
the other way.

Parts of ranks are filled up to one size inside of an exchange only, so that any length can be cut.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise._torch.collectives import gather_over, scatter_sum_over, swap_over
from shardwise.errors import UnsupportedError
from shardwise.model.attend import Attention, now
from shardwise.model.rows import Order, most_rows, num_chunks, rows_of, spans_of


class At(NamedTuple):
    """The positions of this rank in the sequences of one forward, as tensors: a block gets them as an argument, so that its second run in
    backward, and a compiled graph, have those of the first run.

    Attributes:
        rows: this rank's positions; where it has none, the first one stands for them: code cannot always run on nothing. It is in no exchange,
            and not in the output.
        places: where each position lies in what is gathered, with what fills parts up.
    """

    rows: Tensor
    places: Tensor

    @property
    def length(self) -> int:
        return self.places.shape[0]


class Ranks(NamedTuple):
    """The ranks along ``cp``.

    Attributes:
        group: name of their group.
        size, rank: how many there are, and which is this.
        order: which positions each has.
    """

    group: str
    size: int
    rank: int
    order: Order

    def at(self, length: int, device: torch.device) -> At:
        """This rank's positions of sequences of ``length``."""
        parts, most = rows_of(length, self.size, self.order, device), self._most(length)
        places = torch.empty(length, dtype=torch.long, device=device)
        for i, rows in enumerate(parts):
            places[rows] = i * most + torch.arange(len(rows), device=device)
        rows = parts[self.rank]
        return At(rows if len(rows) else rows.new_zeros(1), places)

    def has_rows(self, length: int) -> bool:
        """Whether this rank has positions of sequences of ``length``: the first ones of a rank are in its first chunk."""
        return self.rank * -(-length // num_chunks(self.size, self.order)) < length

    def gathered(self, x: Tensor, at: At, dim: int) -> Tensor:
        """The rows of all ranks along ``dim``, in the order of their positions."""
        rows = self._filled(x.movedim(dim, 0), at.length)
        return gather_over(rows, self.group, self.size).index_select(0, at.places).movedim(0, dim)

    def summed(self, x: Tensor, at: At, dim: int, *, is_gradient: bool = True) -> Tensor:
        """This rank's rows of the sum over the ranks; where it has none, a row of zeros if they are gradients, else the first position: code can
        be at a loss with zeros."""
        x = x.movedim(dim, 0)
        full = self._in_places(x, at, is_gradient)
        return scatter_sum_over(full, self.group, self.size)[: at.rows.shape[0]].movedim(0, dim)

    def to_heads(self, x: Tensor, at: At) -> Tensor:
        """``[batch, heads, rows, width]`` -> ``[batch, heads / n, positions, width]``: all positions of this rank's heads."""
        (batch, heads, _, width), size, most = x.shape, self.size, self._most(at.length)
        rows = self._filled(x.movedim(2, 0), at.length).movedim(0, 2)
        parts = (
            rows.reshape(batch, size, heads // size, most, width)
            .movedim(1, 0)
            .reshape(size * batch, heads // size, most, width)
        )
        swapped = swap_over(parts, self.group, self.size).view(size, batch, heads // size, most, width)
        return swapped.movedim(0, 2).reshape(batch, heads // size, size * most, width).index_select(2, at.places)

    def to_rows(self, x: Tensor, at: At, *, is_gradient: bool) -> Tensor:
        """``[batch, heads / n, positions, width]`` -> ``[batch, heads, rows, width]``. A rank without rows: as in :meth:`summed`."""
        (batch, heads, _, width), size, most = x.shape, self.size, self._most(at.length)
        full = self._in_places(x.movedim(2, 0), at, is_gradient).movedim(0, 2)
        parts = full.view(batch, heads, size, most, width).movedim(2, 0).reshape(size * batch, heads, most, width)
        swapped = swap_over(parts, self.group, self.size).view(size, batch, heads, most, width)
        return swapped.movedim(0, 1).reshape(batch, size * heads, most, width)[:, :, : at.rows.shape[0]]

    def _most(self, length: int) -> int:
        return most_rows(length, self.size, self.order)

    def _in_places(self, x: Tensor, at: At, is_gradient: bool) -> Tensor:
        """All positions, along dim 0, each at its place in what is exchanged; zeros, or the first position, behind the rows of each rank."""
        num = self.size * self._most(at.length)
        if is_gradient or self._replace(rank=self.size - 1).has_rows(at.length):  # what is behind rows is left out
            return x.new_zeros(num, *x.shape[1:]).index_copy(0, at.places, x)
        sources = torch.arange(at.length, device=x.device)
        return x.index_select(0, torch.zeros_like(sources[:1]).repeat(num).index_copy(0, at.places, sources))

    def _filled(self, rows: Tensor, length: int) -> Tensor:
        """Rows along dim 0, and zeros behind them where this rank has fewer than another."""
        missing = self._most(length) - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class Gather(torch.autograd.Function):
    """The rows of all ranks, in order; backward: this rank's rows of the sum of the ranks' gradients, of which each has a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor, ranks: tuple[Any, ...], dim: int) -> Tensor:
        ctx.save_for_backward(rows, places)
        ctx.ranks, ctx.dim, ctx.num = ranks, dim, x.shape[dim]
        return Ranks(*ranks).gathered(x, At(rows, places), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad = Ranks(*ctx.ranks).summed(grad, At(*ctx.saved_tensors), ctx.dim)
        return grad.narrow(ctx.dim, 0, ctx.num), None, None, None, None


Move = Literal["rows", "gather", "sum"]
"""To this rank's rows of what every rank has; to all rows; to this rank's rows of the sum over the ranks."""


class Moved(torch.autograd.Function):
    """A tensor that is moved between rows and all of them, ``there`` forward and ``back`` backward: ``rows`` where the gradient on every
    rank is whole, ``sum`` where it is a part of a sum. Its backward is made of itself, so that gradients can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        places: Tensor,
        ranks: tuple[Any, ...],
        dim: int,
        there: Move,
        back: Move,
        is_gradient: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, places)
        ctx.ranks, ctx.dim, ctx.there, ctx.back = ranks, dim, there, back
        ctx.sides = (
            ranks[0],
            "whole" if there == "gather" and back == "rows" else "part",
            "whole" if there == "rows" else "part",
        )
        return _moved(x, At(rows, places), Ranks(*ranks), dim, there, is_gradient=is_gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, places = ctx.saved_tensors
        return Moved.apply(grad, rows, places, ctx.ranks, ctx.dim, ctx.back, ctx.there, True), *[None] * 7


def moved(x: Tensor, at: At, ranks: Ranks, dim: int, there: Move, back: Move) -> Tensor:
    """A tensor that is moved between rows and all of them; see :class:`Moved`. ``dim``: of positions; ``-1 - dim``: of samples and
    positions."""
    num = at.rows.shape[0] if there == "gather" else at.length
    is_flat, dim = dim < 0, max(dim, -1 - dim)
    if x.shape[dim] % num or not (is_flat or x.shape[dim] == num):
        raise UnsupportedError(
            f"a tensor {tuple(x.shape)} with {x.shape[dim]} positions, and not {num}",
            why="on the example they were those of the sequences that the model is given",
            fix="pass example= with a micro-batch as training gives it, of two samples or more",
        )
    if is_flat:
        x, dim = x.unflatten(dim, (-1, num)), dim + 1
    if x.is_floating_point():
        x = Moved.apply(x, *at, tuple(ranks), dim, there, back, False)
    else:
        x = _moved(x, at, ranks, dim, there)
    return (x.flatten(dim - 1, dim) if is_flat else x).contiguous()


def _moved(x: Tensor, at: At, ranks: Ranks, dim: int, there: Move, *, is_gradient: bool = False) -> Tensor:
    if there == "rows":
        x = x.index_select(dim, at.rows)
        return torch.zeros_like(x) if is_gradient and not ranks.has_rows(at.length) else x
    return ranks.gathered(x, at, dim) if there == "gather" else ranks.summed(x, at, dim, is_gradient=is_gradient)


class Swap(torch.autograd.Function):
    """From rows to heads (``to_heads``), or back; backward: the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor, ranks: tuple[Any, ...], to_heads: bool) -> Tensor:
        ctx.save_for_backward(rows, places)
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _swapped(x, ranks, At(rows, places), to_heads, is_gradient=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return (
            _swapped(grad, ctx.ranks, At(*ctx.saved_tensors), not ctx.to_heads, is_gradient=True),
            None,
            None,
            None,
            None,
        )


def _swapped(x: Tensor, ranks: tuple[Any, ...], at: At, to_heads: bool, *, is_gradient: bool) -> Tensor:
    return Ranks(*ranks).to_heads(x, at) if to_heads else Ranks(*ranks).to_rows(x, at, is_gradient=is_gradient)


def gathered(x: Tensor, at: At, ranks: Ranks, dim: int) -> Tensor:
    """The rows of all ranks along ``dim``, contiguous, as code may expect of what it is given; with gradients where there are some."""
    if x.is_floating_point():
        return Gather.apply(x, *at, tuple(ranks), dim).contiguous()  # type: ignore[no-any-return]
    return ranks.gathered(x, at, dim).contiguous()


def attend_over_heads(call: Attention, at: At, ranks: Ranks) -> Tensor:
    """Attention of this rank's heads over all positions. (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509)"""
    exchange = (*at, tuple(ranks))
    q, k, v = (Swap.apply(x, *exchange, True) for x in (call.q, call.k, call.v))
    return Swap.apply(call.kernel(q, k, v, None), *exchange, False)  # type: ignore[no-any-return]


def attend_gathered(call: Attention, at: At, ranks: Ranks) -> Tensor:
    """Attention of this rank's queries over gathered keys and values."""
    spans = spans_of(at.length, ranks.size, ranks.order, ranks.rank)
    sizes = [stop - start for start, stop in spans]

    def compute(keys: Tensor, values: Tensor) -> Tensor:
        return call.kernel(call.q, keys, values, at.rows)

    def compute_chunks(keys: Tensor, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        parts = zip(call.q.split(sizes, -2), at.rows.split(sizes), spans, strict=True)
        found = [call.kernel(q, keys[..., :stop, :], values[..., :stop, :], rows) for q, rows, (_, stop) in parts]
        return torch.cat([x.transpose(-2, -3) for x in found], -3).transpose(-2, -3), found  # as kernels lay it out

    has_chunks = call.is_causal and len(sizes) > 1 and all(sizes) and sum(sizes) == call.q.shape[-2]
    dims = call.k.dim() - 2, call.v.dim() - 2
    found = with_gathered(compute_chunks if has_chunks else compute, (call.k, call.v), dims, at, ranks)
    return found[0] if has_chunks else found  # type: ignore[no-any-return]


def with_gathered(
    compute: Callable[..., Any], given: Sequence[Tensor], dims: Sequence[int], at: At, ranks: Ranks
) -> Any:
    """What is computed of all positions of tensors, gathered along ``dims``. What backward needs of those is kept as this rank's part, and
    gathered once more, whatever computes; masks that are made of positions are made once more; and what ``compute`` returns beside, which lies
    one behind another in what it returns along dim -2, is kept as parts of that."""
    full = [Gather.apply(x, *at, tuple(ranks), dim) for x, dim in zip(given, dims, strict=True)]
    if torch.compiler.is_compiling():  # the graph's partitioner decides what is kept
        return compute(*full)
    parts = {
        _storage(x): _Gathered(part.detach(), functools.partial(ranks.gathered, at=at, dim=dim))
        for x, part, dim in zip(full, given, dims, strict=True)
        if x.numel()
    }
    masks: dict[int, Any] = {}  # alive while the kernel runs, so that no other tensor takes the place of one
    others: list[_Kept] = []

    def pack(x: Tensor) -> Any:
        storage = _storage(x) if x.numel() else 0
        found = parts.get(storage) or (_Gathered(*masks[storage][:2]) if storage in masks else None)
        if found is None:
            others.append(_Kept(x))
            return others[-1]
        found.num_kept += 1
        return _Again(found, x.size(), x.stride(), x.storage_offset())

    before, now.masks = now.masks, masks
    try:
        with saved_tensors_hooks(pack, lambda kept: kept.unpacked()):
            found = compute(*full)
        if isinstance(found, tuple):
            result, pieces = found
            of_pieces = result.detach().split([x.shape[-2] for x in pieces], -2)
            lies_in = {_storage(x): part for x, part in zip(pieces, of_pieces, strict=True)}
            for kept in others:
                part = lies_in.get(_storage(kept.part))
                if part is not None and part.shape == kept.part.shape:
                    kept.part = part
        return found
    finally:
        now.masks = before
        masks.clear()  # graphs keep both hooks
        others.clear()


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@dataclasses.dataclass
class _Kept:
    """A tensor that is kept as it is."""

    part: Tensor

    def unpacked(self) -> Tensor:
        return self.part


@dataclasses.dataclass
class _Gathered:
    """What is made of a part, or of rows, as often as a backward runs: once for all that is kept of it."""

    part: Tensor
    make: Callable[[Tensor], Tensor]
    num_kept: int = 0
    num_left: int = 0
    whole: Tensor | None = None

    def again(self) -> Tensor:
        if self.whole is None:
            self.whole, self.num_left = self.make(self.part), self.num_kept
        whole, self.num_left = self.whole, self.num_left - 1
        if not self.num_left:
            self.whole = None
        return whole


class _Again(NamedTuple):
    """A view of what is made once more."""

    of: _Gathered
    size: Any
    stride: Any
    offset: Any

    @property
    def part(self) -> Tensor:
        return self.of.part

    def unpacked(self) -> Tensor:
        return self.of.again().as_strided(self.size, self.stride, self.offset)
