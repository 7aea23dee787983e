"""One mesh axis of a world from one rank's view: its peers, and collectives over them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UsageError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


class Axis:
    """A mesh or derived axis as one rank sees it. Every rank of the axis must make the same calls; at a degree of 1
    they change nothing.

    Attributes:
        name: "dp_shard", "dp", ...
        size: degree.
        rank: this rank's index along the axis.
        ranks: global ranks along the axis, in axis order.
        group: the torch process group; at degree 1 of a larger world one of this rank alone, since None would mean all ranks to torch.
            None in a world of one rank.
    """

    def __init__(
        self, name: str, rank: int, ranks: tuple[int, ...], group: Any, alone: Callable[[], Any] = lambda: None
    ):
        self.name, self.rank, self.ranks = name, rank, ranks
        self.size = len(ranks)
        self._group, self._alone = group, alone  # the latter makes a group of this rank alone, where it is asked for

    @property
    def group(self) -> Any:
        if self._group is None:
            self._group = self._alone()
        return self._group

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank={self.rank}, ranks={self.ranks})"

    def reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """All-reduces ``tensor`` over the axis by "sum", "mean", "max", "min" or "product" into a new tensor of its
        shape.
        """
        if op != "mean" and op not in _OPS:
            raise UsageError(
                f"reduce(op={op!r})", why="there is no such reduction", fix=f"use one of {[*_OPS, 'mean']}"
            )
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(result, op=_OPS["sum" if op == "mean" else op], group=self.group)
        return result / self.size if op == "mean" else result

    def split(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's piece of ``tensor`` along ``dim``, cut as ``torch.chunk`` does; may be empty."""
        pieces = tensor.chunk(self.size, dim)
        return pieces[self.rank] if self.rank < len(pieces) else tensor.narrow(dim, 0, 0)

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """All-gathers ``tensor`` and concatenates along ``dim``, in axis order; sizes along ``dim`` may differ.

        Raises:
            UsageError: on every rank, for tensors that cannot be joined: 0-dim, or of other shapes or dtypes elsewhere.
        """
        if self.size == 1:
            return tensor
        kinds: list[Any] = [None] * self.size
        dist.all_gather_object(kinds, (tuple(tensor.shape), str(tensor.dtype)), group=self.group)
        sizes = self._sizes(kinds, dim)
        longest = max(sizes)
        padded = tensor.detach().contiguous()
        if tensor.shape[dim] < longest:
            shape = list(tensor.shape)
            shape[dim] = longest - tensor.shape[dim]
            padded = torch.cat([padded, padded.new_zeros(shape)], dim)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def _sizes(self, kinds: list[tuple[tuple[int, ...], str]], dim: int) -> list[int]:
        """Each rank's size along ``dim``; the backend would abort the process on tensors that do not fit together."""
        rests = {(shape[:dim], shape[dim:][1:], dtype) for shape, dtype in kinds if -len(shape) <= dim < len(shape)}
        if len(rests) != 1 or any(not -len(shape) <= dim < len(shape) for shape, _ in kinds):
            shown = "; ".join(
                f"rank {rank}: {list(shape)} {dtype}" for rank, (shape, dtype) in zip(self.ranks, kinds, strict=True)
            )
            raise UsageError(
                f"gather(dim={dim}) over {self.name} of tensors that cannot be joined",
                why=f"apart from dim {dim} they must have the same shape and dtype: {shown}",
                fix="give tensors of one shape and dtype, at least 1-dim, or use world.gather for objects",
            )
        return [shape[dim] for shape, _ in kinds]
