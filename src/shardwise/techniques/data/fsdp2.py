"""Sharded data parallelism: applies torch's ``fully_shard`` unit by unit, as the recipe says.

Two settings on every unit make the numbers those of one process. Gradients are summed, never averaged (divide factor 1,
plain sums; gloo has no pre-multiplied sum). A parameter that this rank did not use contributes zeros, so that ranks
always reduce the same tensors; which parameters were used at all is recorded before the reduction.
"""

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import RunningBackward
from shardwise._torch.fsdp2 import Unit, take_over
from shardwise._torch.fully_shard import lazy_chunks, parameter_groups, sum_gradients
from shardwise._torch.modules import materialise
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.model import canonical_modules
from shardwise.model.tensors import give_memory, light_marks, tensors_of
from shardwise.recipe import ROOT, Recipe
from shardwise.techniques.data.explain import translated
from shardwise.techniques.data.fsdp2_units import (
    entry_of,
    groups_of,
    leave_unflattened,
    offload_of,
    refuse_containers,
    refuse_other_cuts,
    root_unit,
    units_of,
)
from shardwise.techniques.data.gradients import EndOfBackward, Padding, State, outside_of_windows
from shardwise.techniques.data.passes import Units
from shardwise.techniques.data.unit_order import Order
from shardwise.techniques.edges import GATHERS, calls, refuse_ungathered
from shardwise.world import World


def apply_fsdp2(module: nn.Module, recipe: Recipe, world: World) -> "FSDP2Engine":
    """Shards ``module`` in place. Parameters may be on meta; their values are written later."""
    modules = dict(canonical_modules(module))
    mesh = world.sharding_mesh()
    refuse_other_cuts(recipe)
    cut = {name for name, param in recipe.params.items() if param.cuts}
    parameters = tensors_of(module, "_parameters")
    give_memory(module, world.device, without=[p for name, p in parameters.items() if name in cut])  # ties are kept
    for name in cut:  # fully_shard needs contiguous rows (channels_last is lost)
        if not parameters[name].is_contiguous():
            parameters[name].data = parameters[name].data.contiguous()
    whole = {p for name, p in tensors_of(module, "_parameters").items() if name not in cut}
    for unit in (*(unit for unit in recipe.units if unit.name != ROOT), root_unit(recipe)):
        targets = list({id(modules[name]): modules[name] for name in unit.modules}.values())  # one may be there twice
        refuse_containers(modules, unit.modules)
        is_over_some = not isinstance(unit.reshard, bool) and 1 < unit.reshard < world.layout.degree("fsdp")
        after_forward = world.resharding_mesh(unit.reshard) if is_over_some else None
        with lazy_chunks(), parameter_groups(groups_of(recipe, unit.name, parameters, world), after_forward):
            fully_shard(  # type: ignore[call-overload]
                targets if len(targets) > 1 else targets[0],
                mesh=mesh,
                reshard_after_forward=is_over_some or unit.reshard,
                mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
                offload_policy=offload_of(recipe, world),
                ignored_params=whole,
            )
    for child in module.modules():
        if isinstance(child, FSDPModule):
            sum_gradients(child)
    materialise(module, world.device, cut=torch.device("cpu") if entry_of(recipe).offload else world.device)
    leave_unflattened(module)
    for name, param in tensors_of(module, "_parameters").items():
        if name in cut:
            vars(param).update(vars(parameters[name]))  # what the user has set on it, such as "no weight decay"
    return FSDP2Engine(module, recipe, world)


@dataclass
class _UnitLog:
    """The units of all models of a world that were gathered and reduced in windows, in order. If they differ by rank,
    collectives were mismatched."""

    entries: list[str] = field(default_factory=list)
    num_windows: int = 0  # number of open windows
    num_models: int = 0


_taken: "weakref.WeakKeyDictionary[World, _UnitLog]" = weakref.WeakKeyDictionary()


class FSDP2Engine:
    """Controls gradient synchronisation of a module sharded by :func:`apply_fsdp2`; see ``parallel.protocols.Engine``."""

    hides_outputs = False  # hooks on what a unit returns are not compiled

    def __init__(self, module: nn.Module, recipe: Recipe, world: World):
        self.root, self.recipe, self.world = module, recipe, world
        self._sync_each = entry_of(recipe).sync_every_microbatch
        self._keeps_root = root_unit(recipe).reshard is False
        trainable = [name for name, param in recipe.params.items() if param.trainable]
        self._position = {name: i for i, name in enumerate(trainable)}
        self._used = torch.zeros(len(trainable), dtype=torch.uint8)
        self._running = RunningBackward()
        self._taken = _taken.setdefault(world, _UnitLog())
        self._number = self._taken.num_models  # number of this model among those of the world
        self._taken.num_models += 1
        self._state = State.OUTSIDE
        self._waits = False  # gradients were accumulated that no backward has reduced since
        self._has_lost = False  # gradients of the window, or of micro-batches of ``accumulate``, were lost by an error
        parameters: dict[str, Any] = tensors_of(module, "_parameters")
        self._params = [parameters[name] for name in trainable]
        self._whole = [parameters[name] for name in trainable if recipe.params[name].shape == ()]
        self._padding = Padding()
        self._past = -1  # the last shard that a backward came to by itself
        self._ending = EndOfBackward()
        take_over(module)
        units = units_of(module, recipe, parameters)
        self._positions = {
            unit.name: [self._position.get(units.names[id(shard)], -1) for shard, _, _ in unit.shards()]
            for unit in units.all()
        }
        self.order = Order(module, units, world, self)
        self._watch_parts(module, units)
        if world.watch is not None:
            axis = world.axis("fsdp")
            world.watch.gathers_with(axis.ranks, axis.group)
        self._watch_gradients()
        self._leave_reduction()

    # ---- called by a window ----------------------------------------------------------------------------------

    def set_last(self, is_last: bool) -> None:
        self._state = State.SENT if is_last else State.KEPT
        self._set_reduction(is_last, each=self._sync_each)
        self.order.units.root.end_reuse(is_last)

    def _set_reduction(self, is_last: bool, *, each: Any) -> None:
        """FSDP2 itself can only reduce at the end of each backward."""
        reduces = is_last or bool(each)
        for unit in self.order.units.all():
            unit.sum_gradients(reduces, is_last if each == "reduce_scatter" else reduces)

    def _leave_reduction(self) -> None:
        """Sets what holds outside of windows: on one rank a plain backward gives gradients as it ends, on several there is none."""
        self._set_reduction(self.world.size == 1, each=False)
        self.order.units.root.end_reuse(True)

    def set_micro_batch(self, micro_batch: int | None) -> None:
        self.order.micro_batch = micro_batch

    def set_padding(self, padding: bool) -> None:
        self._padding.set(padding, self._whole)

    def note_added(self, params: Sequence[nn.Parameter]) -> None:
        added = set(map(id, params))
        for position, param in enumerate(self._params):
            if id(param) in added:
                self._used[position] = 1

    def complete(self, place: str) -> None:
        self.order.look()
        if self._has_lost:
            raise UsageError(
                "a backward that raised an error, which was caught before the last micro-batch",
                why="units that it had left have their gradients, the others do not, and those of micro-batches before it are dropped",
                fix="let the error leave the window, or accumulate, which gives back the gradients of before; then run it again without "
                "that micro-batch, on every rank",
            )
        if self._waits:  # the last micro-batch had no backward
            self.world.agreement.sum({}, f"{place}, summing gradients of the micro-batches before")
            self._set_reduction(True, each=False)
            self.order.flush()
            self._waits = False
        self._state = State.SUMMED
        self._leave_reduction()

    def end(self) -> None:
        self._leave_window()

    def holds(self) -> bool:
        return self._waits

    def has_gradients(self) -> bool:
        return self._waits or bool(self._used.any())

    def flat_gradients(self) -> Sequence[Tensor]:
        return ()

    def used(self) -> Tensor:
        return self._used

    def late(self) -> None:
        return None

    def add_late(self, used: Sequence[float], place: str) -> None:
        pass  # FSDP2 sums at the end of each backward

    def entered(self) -> list[str]:
        return self._taken.entries

    def begin(self, *, reuses: bool, gathers_once: bool, marks_parts: bool) -> None:
        self.order.look()  # a backward that raised before the window is not of it
        self._leave_window()
        self._has_lost = False
        self._used.zero_()
        if not self._taken.num_windows:
            self._taken.entries = []
        self._taken.num_windows += 1
        self.order.reuse(reuses, root=gathers_once and self._keeps_root)
        self.set_last(False)

    def abandon(self) -> None:
        self._leave_reduction()
        self._leave_window()
        self._waits = self._has_lost = False
        self.order.abandon()

    def drop_gathered(self) -> None:
        self.order.free()

    def gathered(self) -> list[tuple[Tensor, Tensor]]:
        return [pair for unit in self.order.units.all() for pair in unit.gathered()]

    def watch_writes(self, compares: bool) -> None:
        for unit in self.order.units.all():
            unit.watch_writes(light_marks if compares else None)

    def lost_writes(self) -> list[Tensor]:
        return [shard for unit in self.order.units.all() for shard in unit.lost_writes()]

    def whole(self) -> contextlib.AbstractContextManager[None]:
        return self.order.whole()

    def explain(self, error: BaseException) -> ShardwiseError | None:
        return translated(self.root, error)

    # ---- called by the order of units ------------------------------------------------------------------------

    def begins_backward(self) -> None:
        self._waits = self._waits or self._state is State.KEPT

    def loses_backward(self) -> None:
        self._has_lost = self._state is not State.OUTSIDE

    def takes(self, unit: Unit, *, backward: bool) -> None:
        if not backward:
            if self._padding.is_on and self._padding.hook is not None:
                unit.hook_before_gradients(self._padding.hook)
            self._note(unit.name)
            return
        numbers = self._positions[unit.name]
        # Not one that was unfrozen since.
        positions = [numbers[i] for i in unit.positions_with_gradient() if numbers[i] >= 0]
        if positions and self._state is State.OUTSIDE and self.world.size > 1:
            raise outside_of_windows(self.world.axis("loss").size)
        self._used[positions] = 1
        if unit.reduces:  # all ranks must reduce in the same order, or gradients are mismatched
            self._note(f"{unit.name} (backward)" if unit.name else "(root) (backward)")
            if unit.name == ROOT and self._state is State.SENT:
                self._waits = False

    def _note(self, entry: str) -> None:
        """Records a unit that was gathered or reduced. Gathers without gradients are recorded too: another rank may
        gather the same unit only to keep the order, with gradients on. Outside of windows nothing is compared, and the
        list would grow without limit."""
        if self._taken.num_windows:
            self._taken.entries.append(f"model {self._number}: {entry}" if self._number else entry)

    def _leave_window(self) -> None:
        if self._state is not State.OUTSIDE:
            self.order.reuse(False, root=self._keeps_root)
            self._taken.num_windows -= 1
        self._state = State.OUTSIDE

    def _watch_parts(self, root: nn.Module, units: Units) -> None:
        """Gives each module with sharded parameters what gathers them when it runs by itself, and refuses it where that is not
        possible."""
        numbers = {id(shard): number for number, unit in units.numbered() for shard, _, _ in unit.shards()}
        heads = {id(module) for unit in units.all() for module in unit.modules}
        guards: dict[int | None, list[Any]] = {}
        for prefix, child in canonical_modules(root):
            cut = [param for param in child._parameters.values() if isinstance(param, DTensor)]
            if cut:
                number = numbers[id(cut[0])]
                gathers = self.order.gathers(number)
                child.__dict__[GATHERS] = gathers
                if id(child) not in heads:
                    handle = child.register_forward_pre_hook(refuse_ungathered(prefix, gathers), prepend=True)
                    # A module with parameters of several units keeps its hook: they are not whole together.
                    if {numbers[id(param)] for param in cut} == {number}:
                        guards.setdefault(number, []).append(handle)
        for number, handles in guards.items():
            units.unit(number).guard(handles)

    def _watch_gradients(self) -> None:
        """Registers hooks on the parameters themselves. Gradients of unsharded parameters are summed by an exchange; one that reaches a
        sharded parameter itself, and not its gathered copy, would be summed by nothing. Empty parameters are only counted."""
        for name, position in self._position.items():
            param = self._params[position]
            if param.shape != () and self.recipe.params[name].cuts:
                param.register_hook(calls(self._expect_cut, position))
            else:
                param.register_post_accumulate_grad_hook(calls(self._mark_used, position))

    def _mark_used(self, position: int) -> None:
        self._used[position] = 1

    def _expect_cut(self, position: int) -> None:
        if self._running.accumulates(self._params[position]):
            self._used[position] = 1
            if self.world.size > 1:
                self._past = position
                if not self._ending.is_due:
                    self._ending.call(self._refuse_past)

    def _refuse_past(self) -> None:
        """Called at the end of a backward that came to shards themselves: until then ranks work together."""
        self._ending.forget()
        raise UnsupportedError(
            "a loss that uses a parameter outside the model's forward (param.full_tensor() in it)",
            why="the parameter is cut over the ranks, and each rank's part would get that rank's gradient alone: data of the others is "
            "lost, and a weight penalty counts with the loss of one rank",
            fix="use the parameter inside forward; a weight penalty: sw.parameter_penalty(model, penalty), once per window",
            name=next(name for name, at in self._position.items() if at == self._past),
        )
