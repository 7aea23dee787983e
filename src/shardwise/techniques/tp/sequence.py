"""Sequence parallelism: between layers that are cut over ``tp`` each rank has its positions of the stream. (Megatron-LM,
https://arxiv.org/abs/2205.05198, section 4.2.2)

==============================  =============  ==========================================================================
where                           forward        backward
==============================  =============  ==========================================================================
entry of the first block        rows           gather: what is before is whole on every rank
site, before a region           gather         sum to rows: in the place of the sum of the input's gradient
row-parallel layer              sum to rows    gather
island: entry, exit             gather, rows   rows, gather: gradients in it are whole
behind the last block           gather         rows
==============================  =============  ==========================================================================

What a site has joined is whole, with a whole gradient, as everything is without sequence parallelism. A column-parallel layer that gets
just that takes it by a way of its own, on which its part of the gradient is summed to rows.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import first_nodes
from shardwise.errors import UnsupportedError, UsageError
from shardwise.model import canonical_modules
from shardwise.model.pytrees import changed_at, keyed_leaves, keys_of, map_keyed
from shardwise.recipe import Recipe
from shardwise.techniques.cut_forward import (
    CutForward,
    clear_after,
    current_of,
    on_all_positions,
    with_positions,
)
from shardwise.techniques.row_drops import RowDrops
from shardwise.techniques.row_exchanges import At, Moved, Ranks, moved
from shardwise.techniques.tp.exchanges import SumGradient
from shardwise.techniques.tp.rule import SequenceParallelData
from shardwise.world.streams import PartStream


class JoinedStream:
    """Joins the stream before regions, and sums outputs of theirs to rows."""

    def __init__(self, ranks: Ranks):
        self.ranks, self._current = ranks, current_of("tp")
        self.is_cut = False  # the stream behind the last block that ran
        # Rows and all of them, each with its version: a tensor that was written in place is another; dim, positions.
        self._joined: list[tuple[Tensor, int, Tensor, int, int, At]] = []
        self._ways: list[tuple[Tensor, int, Tensor]] = []  # what was joined; the same for column-parallel layers

    @property
    def at(self) -> At | None:
        """The positions of this rank in the block that runs; None: all."""
        return self._current.at

    def refuse_rows(self) -> None:
        """Raises UnsupportedError for a layer that is called behind the blocks, where the stream was not joined."""
        if self.is_cut and self.at is None:
            raise _other_way()

    def join(self, x: Tensor, dim: int) -> Tensor:
        """All rows of ``x``, with a whole gradient."""
        at = self.at
        if at is None:
            return x
        for rows, version, whole, of_whole, _, _ in self._joined:
            if rows is x and version == _version(x) and of_whole == _version(whole):
                return whole
        whole = moved(x, at, self.ranks, dim, "gather", "rows")
        if x.is_floating_point():
            self._joined.append((x, _version(x), whole, _version(whole), dim, at))
        return whole

    def for_columns(self, x: Tensor) -> Tensor | None:
        """``x``, of whose gradient each rank has a part, summed to rows; None: it is not what was joined."""
        for joined, version, way in self._ways:
            if joined is x and version == _version(x):
                return way
        for rows, _, whole, version, dim, at in self._joined:
            if whole is x and version == _version(x) and rows.requires_grad and torch.is_grad_enabled():
                way = _again(rows, whole, at, self.ranks, dim)
                self._ways.append((whole, version, way))
                return way
        return None

    def scatter(self, x: Tensor, at: At, dim: int) -> Tensor:
        """This rank's rows of the sum of ``x`` over the ranks."""
        self.forget()
        return moved(x, at, self.ranks, dim, "sum", "gather")

    def forget(self) -> None:
        self._joined.clear()
        self._ways.clear()


def _other_way() -> UnsupportedError:
    return UnsupportedError(
        "a forward with sequence_parallel=True whose output is of other positions than on the example",
        why="the code took another way: blocks that were left out, at which the positions of all ranks are joined",
        fix="let the last block run in each forward; or leave sequence_parallel out for this model",
    )


def _version(x: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


class _Again(torch.autograd.Function):
    """What was gathered of ``x``, without gathering it; backward: this rank's rows of the sum of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor, rows: Tensor, places: Tensor, ranks: tuple[Any, ...], dim: int
    ) -> Tensor:
        ctx.save_for_backward(rows, places)
        ctx.ranks, ctx.dim, ctx.sides = ranks, dim, (ranks[0], "part", "part")
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return Moved.apply(grad, *ctx.saved_tensors, ctx.ranks, ctx.dim, "sum", "gather", True), *[None] * 5


def _again(x: Tensor, whole: Tensor, at: At, ranks: Ranks, dim: int) -> Tensor:
    """All rows of ``x``, which were gathered as ``whole``."""
    whole = whole.detach()
    if dim >= 0:
        return _Again.apply(x, whole, *at, tuple(ranks), dim)  # type: ignore[no-any-return]
    dim = -1 - dim
    x, whole = x.unflatten(dim, (-1, at.rows.shape[0])), whole.unflatten(dim, (-1, at.length))
    return _Again.apply(x, whole, *at, tuple(ranks), dim + 1).flatten(dim, dim + 1)  # type: ignore[no-any-return]


class SequenceCuts(CutForward):
    """The streams of one model, cut over ``tp``.

    Args:
        module: is changed.
        recipe: says where.
        data: of sequence parallelism.
        joined: is called by layers that are cut.
        stream: random numbers of this rank, for what it drops of its rows; None: nothing is dropped.
        outer: has cut the sequences before; None: nothing has.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        data: SequenceParallelData,
        joined: JoinedStream,
        stream: PartStream | None,
        outer: CutForward | None = None,
    ):
        super().__init__(joined.ranks, "tp", data.source, data.dim, data.constants, data.extra)
        self.outer = outer
        if outer is not None:
            outer.inner = self
        self._data, self._joined, self._stream = data, joined, stream
        self.for_two_lengths = "parallelize(..., example=batch), with sequences of two lengths that differ in it; or leave sequence_parallel out"
        self._ended: set[str] = set()  # blocks whose output was joined, in this forward
        self._ends: set[str] = set()  # blocks of which that is to be
        module.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        module.register_forward_hook(self._end_forward, prepend=outer is not None)
        clear_after(module, self.clear)
        modules = dict(canonical_modules(module))
        if stream is not None:
            dims = {edit.module: edit.args["dims"] for edit in recipe.edits_of("tp") if edit.action == "sequence_drops"}
            RowDrops(module, dims, self, stream, what="sequence_parallel")
        blocks = [edit for edit in recipe.edits_of("tp") if edit.action == "sequence_cut"]
        for edit in recipe.edits_of("tp"):
            target, args = modules[edit.module], edit.args
            if edit.action == "sequence_site":
                _join_inputs(target, edit.module, joined, args["dims"])
            elif edit.action == "sequence_island":
                _make_island(target, joined, args["inputs"], args["outputs"])
            elif edit.action == "sequence_join" and all(edit.module != block.module for block in blocks):
                _join_outputs(target, joined, args["dims"])
        for edit in blocks:
            target, args = modules[edit.module], edit.args
            with_positions(target, self.what)
            hook = functools.partial(self._enter, edit.module, args["calls"], {*args["known"]}, {*args["parts"]})
            target.register_forward_pre_hook(hook, with_kwargs=True)
        for edit in recipe.edits_of("tp"):
            if edit.action == "sequence_join" and any(edit.module == block.module for block in blocks):
                self._ends.add(edit.module)
                hook = functools.partial(self.leave_block, edit.module, edit.args["dims"])
                modules[edit.module].register_forward_hook(hook, prepend=outer is not None)

    def part(self, x: Tensor, dim: int, at: At) -> Tensor:
        return moved(x, at, self.ranks, dim, "rows", "gather")

    def is_on_rows(self, x: Tensor) -> bool:
        return any(node.there != "gather" for node in first_nodes(x, "MovedBackward"))

    def joined(self, x: Tensor, dim: int, at: At) -> Tensor:
        return moved(x, at, self.ranks, dim, "gather", "rows")

    def was_joined(self, name: str) -> None:
        self._ended.add(name)
        self._joined.is_cut = False

    def clear(self) -> None:
        super().clear()
        self._joined.forget()
        self._joined.is_cut = False
        if self._stream is not None:
            self._stream.leave()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.clear()
        self.is_running = True
        self._num_calls.clear()
        self._ended.clear()
        if not self.is_cut():
            return
        source = self.source_of(module, args, kwargs)
        if not isinstance(source, Tensor):
            raise UsageError(
                f"a forward without {self._data.source}, which the example had",
                why="by it the length of the sequences is known, of which each rank along tp has some positions between layers",
                fix="parallelize(..., example=batch), with one micro-batch as training gives it",
            )
        length = self.length_within(self.length_of(source))
        self.at = self.last = self.positions(length, source.device)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        at, outer = self.at, None if self.outer is None else self.outer.at
        self.clear()
        if at is None:
            return
        lengths = {at.length} if outer is None else {at.length, outer.length}  # behind the outer join
        self.refuse_own_checkpoint(output)
        given = dict(keyed_leaves(output))
        is_other = self._ended != self._ends
        for path, dim in self._data.ends.items():
            x = given.get(path)
            is_other |= isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] not in lengths
        if is_other:
            raise _other_way()

    def _enter(
        self, name: str, calls: Any, known: set[str], parts: set[str], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        given = self.enter_block(name, calls, known, module, args, kwargs)
        self._joined.is_cut = given is not None
        if given is None or not parts:
            return given
        group = self.ranks.group
        return map_keyed(lambda path, x: SumGradient.apply(x, group) if path in parts else x, given)


def _join_inputs(module: nn.Module, name: str, joined: JoinedStream, dims: Mapping[str, int]) -> None:
    """Lets a module get all rows of these arguments."""
    inner, places = module.forward, _places(dims)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if joined.at is not None:
            try:
                for keys, dim in places:
                    args, kwargs = changed_at((args, kwargs), keys, lambda x, dim=dim: joined.join(x, dim))
            except LookupError as error:
                raise UnsupportedError(
                    f"a call without its argument {error}, which it had on the example",
                    why="before it the positions of all ranks along tp are joined",
                    fix="pass example= with a micro-batch as training gives it",
                    name=name,
                ) from None
        return inner(*args, **kwargs)

    module.forward = forward


def _join_outputs(module: nn.Module, joined: JoinedStream, dims: Mapping[str, int]) -> None:
    inner, places = module.forward, _places(dims)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        for keys, dim in places if joined.at is not None else ():
            output = changed_at(output, keys, lambda x, dim=dim: joined.join(x, dim))
        return output

    module.forward = forward


def _make_island(
    module: nn.Module, joined: JoinedStream, inputs: Mapping[str, int], outputs: Mapping[str, int]
) -> None:
    """Lets a module run on all rows on every rank, with whole gradients."""
    inner, ranks = module.forward, joined.ranks
    given, made = _places(inputs), _places(outputs)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        at = joined.at
        if at is None:
            return inner(*args, **kwargs)
        for keys, dim in given:
            args, kwargs = changed_at(
                (args, kwargs), keys, lambda x, dim=dim: moved(x, at, ranks, dim, "gather", "rows")
            )
        joined.forget()
        joined.is_cut = False
        with on_all_positions("tp"):
            output = inner(*args, **kwargs)
        joined.is_cut = True
        for keys, dim in made:
            output = changed_at(output, keys, lambda x, dim=dim: moved(x, at, ranks, dim, "rows", "gather"))
        return output

    module.forward = forward


def _places(dims: Mapping[str, int]) -> list[tuple[list[Any], int]]:
    return [(keys_of(path), dim) for path, dim in dims.items()]
