"""Cuts the sequences of a module over the ranks along ``cp``, in place, as the recipe says; names, classes and hooks stay.

The model's own forward runs on all tokens: positions, masks and embeddings are its own. At the entry of a block what grows with the length
is cut to this rank's rows; attention exchanges; what follows stays on rows, to the loss.
"""

import functools
import re
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.collectives import gather_over, group_name
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError, first_line
from shardwise.model import canonical_modules
from shardwise.model.attend import Attention, catch_transformers, now
from shardwise.model.attention import attentions, write_out
from shardwise.model.calling import FOR_LOSS, TARGETS, by_name
from shardwise.model.pytrees import keyed_leaves, map_keyed
from shardwise.recipe import Recipe
from shardwise.techniques.cp.rule import ContextParallelEntry
from shardwise.techniques.cp.within import Watched, join_keys, make_island, set_apart, watch
from shardwise.techniques.cut_forward import CutForward, check_blocks, clear_after, were_cut, with_positions
from shardwise.techniques.row_drops import RowDrops
from shardwise.techniques.row_exchanges import At, Ranks, attend_gathered, attend_over_heads, gathered
from shardwise.techniques.same_inputs import input_check
from shardwise.techniques.technique import Act
from shardwise.world import World
from shardwise.world.streams import PartStream

_STATE = "_shardwise_cp"  # of the root module


class ContextParallelAct(Act):
    """Cuts sequences at the entry of blocks, and lets attention exchange."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        cut = {edit.module for edit in recipe.edits_of("cp") if edit.action in ("cut", "join")}
        check_blocks(module, recipe, cut, "cp")
        compiled = [edit.module for edit in recipe.edits if edit.action == "compile" and edit.module in cut]
        for drops in recipe.edits_of("cp"):
            block = next((b for b in compiled if f"{drops.module}.".startswith(f"{b}.")), None)
            if drops.action == "drops" and block is not None and min(drops.args["dims"], default=0) < 0:
                raise UnsupportedError(
                    f"Compile of a block that drops what all ranks of {recipe.grid} have, such as whole samples",
                    why="a graph cannot change between streams of random numbers: each rank would drop other ones",
                    fix="leave the block out: Compile(targets=...); or drop of positions alone",
                    name=drops.module,
                )

    def inside(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        if recipe.edits_of("cp"):
            module.__dict__[_STATE] = cuts = _Cuts(module, recipe, world)
            were_cut(module, cuts)

    def begin(self, runtime: Any) -> None:
        cuts = runtime.module.__dict__.get(_STATE)
        if cuts is not None:
            cuts.begin(runtime)


class _Cuts(CutForward):
    def __init__(self, module: nn.Module, recipe: Recipe, world: World):
        axis, entry = world.axis("cp"), recipe.entry("cp", ContextParallelEntry)
        self._entry, self._size, self._layout = entry, axis.size, recipe.grid
        ranks = Ranks(group_name(axis.group), axis.size, axis.rank, entry.order)  # type: ignore[arg-type]
        super().__init__(ranks, "cp", entry.source, entry.dim, entry.constants, entry.extra)
        self.exchange: Callable[[Attention, At, Ranks], Tensor] = (
            attend_over_heads if entry.method == "ulysses" else attend_gathered
        )
        self.drops: RowDrops | None = None
        self._joins = any(edit.action == "join" for edit in recipe.edits_of("cp"))
        self._joined = False  # in this forward
        self._made: At | None = None  # the positions of the forward that has just ended
        self.stream = PartStream(world.device, axis.rank, "cp", module)
        self._lengths = dict[
            tuple[int, int], int
        ]()  # first two dims of the forwards of this micro-batch -> that of positions
        self._batch: Any = None
        self._outputs: list[
            tuple[weakref.ref[Tensor], int, int]
        ] = []  # of this micro-batch, each with its dim and number of positions
        self._of_positions: dict[
            str, bool
        ] = {}  # entries of micro-batches so far -> whether they are as long as sequences
        self._cut_batch: Any = None  # the last of a loop of the user's own
        self._cut_now: dict[str, bool] = {}  # the same for its entries
        catch_transformers(module)
        self._apply(module, recipe)

    def begin(self, runtime: Any) -> None:
        super().begin(runtime)
        self._check_inputs = input_check(runtime, "cp")
        if self._entry.output == "whole":
            runtime.share_of_sums /= self._size
        else:
            runtime.split_sequences(self)
            runtime.module.register_forward_hook(self._note_outputs)

    def explain(self, error: BaseException) -> ShardwiseError | None:
        """The ShardwiseError for what a use of cut sequences has raised in the user's code; None: it is of something else."""
        if self.last is None or not isinstance(error, (RuntimeError, ValueError)):
            return super().explain(error)
        num, length = self.num_rows(self.last.length), self.last.length
        numbers = {int(number) for number in re.findall(r"\d+", first_line(error))}
        samples = next(iter(self._lengths), (1, 1))[1 - self._entry.dim]
        if num == length or not any({times * num, times * length} <= numbers for times in (1, samples)):
            return super().explain(error)
        return UsageError(
            f"a tensor of {num} positions and one of {length}, under {self._layout}: {first_line(error)}",
            why=f"what the model returns has this rank's {num} positions; what was made without it, such as a plain teacher's output, has all {length}",
            fix="cut what has all of them: sw.cut_sequence(model, teacher_logits)",
        )

    def num_rows(self, length: int) -> int:
        """How many positions of sequences of ``length`` this rank has."""
        return len(self.positions(length, torch.device("cpu")).rows) if self.ranks.has_rows(length) else 0

    # ---- what runs

    def _apply(self, module: nn.Module, recipe: Recipe) -> None:
        modules = dict(canonical_modules(module))
        blocks = [edit.module for edit in recipe.edits_of("cp") if edit.action == "cut"]
        for name in attentions(module):  # torch's own function checks its mask by the local length
            if any(not block or name == block or name.startswith(f"{block}.") for block in blocks):
                write_out(modules[name], is_cut=False)  # type: ignore[arg-type]
        module.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._end_forward)
        clear_after(module, self.clear)
        compiled = {edit.module for edit in recipe.edits if edit.action == "compile"}
        if (
            self._entry.draws
        ):  # but for compiled blocks: a graph cannot change between streams, so all its numbers are this rank's
            dims = {edit.module: edit.args["dims"] for edit in recipe.edits_of("cp") if edit.action == "drops"}
            self.drops = RowDrops(module, dims, self, self.stream, leave_out=compiled, is_all_drawn=True, what="cp")
        watched: dict[str, Watched] = {}
        for edit in recipe.edits_of("cp"):
            target = modules[edit.module]
            if edit.action in ("attention", "positions", "products"):
                found = edit.args["calls"]
                of_module = watched.setdefault(edit.module, Watched(seen=edit.args["seen"]))
                if edit.action == "attention":
                    of_module.attention, of_module.queries = found
                else:
                    setattr(of_module, edit.action, found)
            elif edit.action == "island":
                make_island(target, self, edit.args["inputs"], edit.args["outputs"])
            elif edit.action == "join":
                target.register_forward_hook(functools.partial(self.leave_block, edit.module, edit.args["dims"]))
            elif edit.action == "keys":
                join_keys(target, self, edit.args["dims"])
        for name, of_module in watched.items():
            watch(modules[name], self, of_module)
        for child in {id(child): child for child in modules.values()}.values() if watched else ():
            set_apart(child)
        for edit in recipe.edits_of("cp"):
            if edit.action == "cut":
                target, is_compiled = modules[edit.module], edit.module in compiled
                with_positions(target, self.what)
                hook = functools.partial(self.enter_block, edit.module, edit.args["calls"], {*edit.args["known"][0]})
                target.register_forward_pre_hook(hook, with_kwargs=True)
                if is_compiled and self.drops is not None:
                    target.register_forward_pre_hook(lambda *_: self.stream.enter() if self.at is not None else None)
                    target.register_forward_hook(lambda *_: self.stream.leave(), always_call=True)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.clear()
        self.is_running, self._joined = True, False
        self._num_calls.clear()
        if not self.is_cut():
            return
        self._check_inputs(args, kwargs)
        given = dict(keyed_leaves(by_name(module, args, kwargs)))
        more = sorted(path for path, x in given.items() if isinstance(x, Tensor) and path not in self._entry.given)
        source = given.get(self._entry.source)
        if more or not isinstance(source, Tensor):
            names = [path.rpartition("['")[2].removesuffix("']") for path in more]
            if labels := [name for name in names if name in {*TARGETS, *FOR_LOSS}]:
                raise UsageError(
                    f"a forward with {', '.join(labels)}, under {self._layout}",
                    why="the model would compare this rank's positions with labels of all, and shift them",
                    fix="take the loss of the logits: loss=sw.next_token_loss, which is the same; with fused=True it holds none of them",
                )
            raise UsageError(
                f"a forward with {', '.join(more)}, which the example did not have"
                if more
                else f"a forward without {self._entry.source}, which the example had",
                why="that its sequences may be cut was proved by running the model on the example, and its code may treat these in another way",
                fix="parallelize(..., example=batch), with one micro-batch as training gives it",
            )
        self.source_of(module, args, kwargs)
        self._refuse_trained(given)
        length = self.length_of(source)
        if self._runtime.micro_batch is not self._batch or self._batch is None:
            self._batch = self._runtime.micro_batch
            self._lengths.clear()
            self._outputs.clear()
        self._lengths[source.shape[0], source.shape[1]] = self._entry.dim
        self.at = self.last = self.positions(length, source.device)
        now.rows = self.at.rows if self._entry.masks_of_rows else None

    def _refuse_trained(self, given: Mapping[str, Any]) -> None:
        """Refuses an argument that requires a gradient and does not come from a sharded parameter: it would be that of this rank's positions."""
        for path, x in given.items() if torch.is_grad_enabled() else ():
            if isinstance(x, Tensor) and x.requires_grad and (leaf := self._runtime.other_leaf(x)) is not None:
                name = path.rpartition("['")[2].removesuffix("']")
                what = (
                    "it requires a gradient" if leaf is x else f"it comes from a tensor {tuple(leaf.shape)} that does"
                )
                raise UnsupportedError(
                    f"a forward with {name} of which a gradient is taken, under {self._layout}",
                    why=f"{what}, and each rank would have that of its own positions, with zeros for the others",
                    fix="torch.autograd.grad(loss, inputs) outside of a window, where a forward is whole on every rank; give what makes it to "
                    "parallelize, as a part of the model; or use a layout without cp",
                )

    def is_cut(self) -> bool:
        is_cut, runtime = super().is_cut(), self._runtime
        if is_cut and runtime.micro_batch is None and runtime.accumulation.of == "step":
            raise UsageError(
                f"a forward with gradients in the loss, under {self._layout}",
                why="what the loss reads of a micro-batch are this rank's positions, and a forward gets all of them",
                fix="call the model in forward= of sw.TrainStep; or in the loss under torch.no_grad()",
            )
        return is_cut

    def _refuse_other_output(self, at: At, output: Any) -> None:
        """Refuses an output that is of other positions than on the example, as where the block was left out at which they are joined."""
        num, given = at.rows.shape[0], dict(keyed_leaves(output))
        is_other = self._joins and not self._joined
        for path, dim in self._entry.outputs.items():
            x = given.get(path)
            is_loss = isinstance(x, Tensor) and not x.dim()  # in the place of logits, by fused=
            is_other |= not is_loss and (not isinstance(x, Tensor) or x.dim() <= dim or bool(x.shape[dim] % num))
        if is_other:
            raise UnsupportedError(
                f"a forward under {self._layout} whose output is of other positions than on the example",
                why="the code took another way: blocks that were left out, or an output that is not there",
                fix="let the last block run in each forward; or leave cp out for this model",
            )

    def clear(self) -> None:
        super().clear()
        now.rows = None
        self.stream.leave()

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        at = self.at
        self.clear()
        if at is not None:
            self._refuse_other_output(at, output)
            self.refuse_own_checkpoint(output)
        if at is None:
            return None
        self._made = at
        if self.ranks.has_rows(at.length):
            return None
        dims = self._entry.outputs
        return map_keyed(lambda path, x: x.narrow(dims[path], 0, 0) if path in dims and x.dim() else x, output)

    def _note_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Notes what a forward returns, as the user gets it."""
        at, self._made = self._made, None
        if at is not None:
            num = self.num_rows(at.length)
            self._outputs += [
                (weakref.ref(x), dim, num)
                for path, x in keyed_leaves(output)
                if isinstance(x, Tensor) and x.dim() and (dim := self._entry.outputs.get(path)) is not None
            ]

    def joined(self, x: Tensor, dim: int, at: At) -> Tensor:
        return gathered(x, at, self.ranks, dim)

    def was_joined(self, name: str) -> None:
        self._joined = True

    def part_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the loss reads: this rank's rows of what has samples and positions as the model's sequences have."""
        whole = {
            path.partition("'")[2].partition("'")[0] for path in self._entry.given if path not in self._entry.lengths
        }
        if batch is not self._cut_batch and self._batch is None:
            self._end_batch()
            self._cut_batch = batch
        return {key: value if key in whole else self._part(key, value) for key, value in batch.items()}

    def _end_batch(self) -> None:
        """Notes which entries of the last micro-batch of a loop of the user's own were as long as one of its sequences."""
        for key, is_long in self._cut_now.items():
            self._note(key, is_long)
        self._cut_now.clear()

    def _note(self, key: str, is_long: bool) -> None:
        """Notes whether an entry is as long as the sequences. One that was not once is of something else."""
        if not is_long and self._of_positions.get(key):
            raise UsageError(
                f"a micro-batch whose entry {key!r} is not as long as its sequences, and before it was, under {self._layout}",
                why="by its size it was taken for a tensor of positions, of which the loss of a rank gets its own",
                fix=f"give {key!r} another shape, such as [samples, 1, size], if it has no positions; or let it have as many as the model is called with. In a "
                "loop of your own, cut each by itself: sw.cut_sequence(model, labels)",
            )
        self._of_positions[key] = is_long

    def cut(self, value: Any, dim: int) -> Any:
        """This rank's positions of a tensor along ``dim``, or of a micro-batch as in :meth:`part_of`."""
        if isinstance(value, Tensor):
            return self.rows_of(value, dim % value.dim())
        if self.last is None:
            raise UsageError(
                "cut_sequence of a micro-batch before a forward of the model",
                why="which of its tensors have positions is known by what the model was called with",
                fix='call the model first; or pass one tensor: sw.cut_sequence(model, batch["labels"])',
            )
        return self.part_of(value)

    def halves(
        self, output: Any, batch: Mapping[str, Any], cut: Collection[str]
    ) -> list[tuple[Any, dict[str, Any]]] | None:
        """Output and micro-batch of two halves of this rank's positions of the last forward; None: it has less than two."""
        num = 0 if self.last is None else self.num_rows(self.last.length)
        if num < 2:
            return None
        dim = next(iter(self._lengths.values()))

        def half(x: Any, dim: int, num: int, number: int) -> Any:
            rows = torch.arange(num).tensor_split(2)[number]
            times = x.shape[dim] // num if num else 0  # samples beside positions in one dim
            index = (torch.arange(times)[:, None] * num + rows).flatten()
            return x.detach().index_select(dim, index.to(x.device))

        known = [(x, dim, num) for ref, dim, num in self._outputs if (x := ref()) is not None]

        def of_output(path: str, x: Any, number: int) -> Any:
            own = next(((dim, num) for each, dim, num in known if each is x), None)
            if own is None and path in self._entry.outputs:  # forward= has computed with it
                own = self._entry.outputs[path], num
            return x if own is None else half(x, own[0], own[1], number)

        return [
            (
                map_keyed(lambda path, x, number=number: of_output(path, x, number), output),
                {key: half(x, dim, x.shape[dim], number) if key in cut else x for key, x in batch.items()},
            )
            for number in range(2)
        ]

    def join(self, x: Tensor, dim: int) -> Tensor:
        """All positions of what each rank has of its own of the last forward that was cut."""
        num = None if self.last is None else self.num_rows(self.last.length)
        is_other = self.last is None or x.shape[dim] != num
        if self.last is not None:  # of nearly equal lengths some ranks have as many positions: then all raise
            told = gather_over(torch.tensor([float(is_other)], device=x.device), self.ranks.group, self.ranks.size)
            is_other = bool(told.any())
        if self.last is None or is_other:
            raise UsageError(
                f"join_sequence of a tensor {tuple(x.shape)} along dim {dim}",
                why="the model was not run on cut sequences yet"
                if num is None
                else f"of the last forward this rank has {num} positions",
                fix="pass what the model's last forward with gradients, or of an evaluation, has returned, and its dim of positions",
            )
        return gathered(x, self.last, self.ranks, dim % x.dim())

    def _part(self, key: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        # A check of the loss runs the model on several copies of the samples.
        alike = [
            (x.shape[dim] == sizes[dim], dim)
            for sizes, dim in self._lengths.items()
            if x.shape[1 - dim] and sizes[1 - dim] % x.shape[1 - dim] == 0
        ]
        if not alike or self._of_positions.get(key) is False:
            return x
        is_long, dim = max(alike)
        if self._batch is not None:
            self._note(key, is_long)
        else:
            self._cut_now[key] = is_long or self._cut_now.get(key, False)
        return self.rows_of(x, dim) if is_long else x

    def rows_of(self, x: Tensor, dim: int) -> Tensor:
        rows = self.positions(x.shape[dim], x.device).rows
        return x.index_select(dim, rows if self.ranks.has_rows(x.shape[dim]) else rows[:0])
