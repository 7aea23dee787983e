"""Sharded data parallelism: torch's ``fully_shard`` applied unit by unit, as the recipe says.

Set here, on every unit, so that the numbers are those of one process: gradients are summed, never averaged (divide factor 1,
plain sums; gloo has no pre-multiplied sum), and a parameter that this rank did not use adds zeros, so that
ranks always reduce the same tensors. Which parameters were used at all is recorded before the reduction.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardwise._compat import (
    drop_partial_gradients,
    lazy_chunks,
    materialise,
    on_unit_backward,
    parameter_groups,
    reset_iteration,
    unit_gradients,
    unit_groups,
)
from shardwise.anatomy import canonical_modules, canonical_tensors, dtype_of, module_of_error
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.parallel.edges import anchor_inputs, before_accumulation, mark_used, refuse_ungathered, whole_outputs
from shardwise.parallel.outside import Outside
from shardwise.parallel.tensors import give_memory, tensors_of
from shardwise.recipe import ROOT, Cut, Recipe, dtype_groups
from shardwise.world import World

__all__ = ["FSDP2Engine", "apply_fsdp2"]


def apply_fsdp2(module: nn.Module, recipe: Recipe, world: World) -> "FSDP2Engine":
    """Shards ``module`` in place. Parameters may be on meta; they stay there until they are given values."""
    modules = dict(canonical_modules(module))
    mesh = world.mesh if world.layout.dp_replicate > 1 else world.mesh["dp_shard"]
    _refuse_other_cuts(recipe)
    cut = {name for name, param in recipe.params.items() if param.cuts}
    parameters = tensors_of(module, "_parameters")
    give_memory(module, world.device, without=[p for name, p in parameters.items() if name in cut])  # ties are kept
    for name in cut:  # fully_shard wants rows that lie one after another (channels_last is lost)
        if not parameters[name].is_contiguous():
            parameters[name].data = parameters[name].data.contiguous()
    whole = {p for name, p in tensors_of(module, "_parameters").items() if name not in cut}
    for unit in (*(unit for unit in recipe.units if unit.name != ROOT), _root_unit(recipe)):
        targets = list({id(modules[name]): modules[name] for name in unit.modules}.values())  # one may have two names
        _refuse_containers(modules, unit.modules)
        for target in targets:
            target.register_forward_hook(whole_outputs)  # before FSDP2's own hook, which is added next
        with lazy_chunks(), parameter_groups(_policies(recipe, unit.name, parameters)):
            fully_shard(  # type: ignore[call-overload]
                targets if len(targets) > 1 else targets[0],
                mesh=mesh,
                reshard_after_forward=unit.reshard,
                mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
                offload_policy=_offload(recipe, world),
                ignored_params=whole,
            )
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)
            child.set_reduce_scatter_unused_params(True, recurse=False)
    _set_prefetch(modules, recipe)
    materialise(module, world.device, cut=torch.device("cpu") if recipe.offload else world.device)
    return FSDP2Engine(module, recipe, world)


def _offload(recipe: Recipe, world: World) -> OffloadPolicy:
    if not recipe.offload:
        return OffloadPolicy()
    # Page-locked memory is the accelerator's; without one torch fails at the first shard ("Cannot access accelerator device").
    return CPUOffloadPolicy(pin_memory=recipe.pin_memory and world.device.type != "cpu")


def _set_prefetch(modules: dict[str, nn.Module], recipe: Recipe) -> None:
    """Of the modules of a unit the first one entered stands for it: FSDP2 has one state for them all."""
    heads: dict[str, Any] = {unit.name: modules[unit.modules[0]] for unit in recipe.units}
    for unit in recipe.units:
        if unit.prefetch_forward:
            heads[unit.name].set_modules_to_forward_prefetch([heads[name] for name in unit.prefetch_forward])
        if unit.prefetch_backward is not None:  # an empty list would mean FSDP2's own choice; itself: nothing more
            behind = [heads[name] for name in unit.prefetch_backward] or [heads[unit.name]]
            heads[unit.name].set_modules_to_backward_prefetch(behind)


def _root_unit(recipe: Recipe) -> Any:
    return next(unit for unit in recipe.units if unit.name == ROOT)


def _refuse_other_cuts(recipe: Recipe) -> None:
    for name, param in recipe.params.items():
        if param.cuts != ((Cut(axis="fsdp", dim=0),) if param.shape and 0 not in param.shape else ()):
            raise UnsupportedError(
                f"cuts {param.cuts} of a tensor of shape {param.shape}",
                why="fully_shard cuts dim 0 over the fsdp axis, and keeps 0-dim tensors whole; nothing else makes cuts yet",
                fix="use the recipe that make_recipe makes",
                name=name,
            )


def _refuse_containers(modules: dict[str, nn.Module], names: tuple[str, ...]) -> None:
    for name in names:
        target = modules[name]
        if isinstance(target, nn.ModuleList | nn.ModuleDict) and type(target).forward is nn.Module.forward:
            raise UnsupportedError(
                f"a {type(target).__name__} as a unit",
                why="it has no forward, so nothing would gather its parameters",
                fix=f"name its children: units=({name + '.*'!r},)"
                if name
                else "hold it in a module that has a forward",
                name=name or None,
            )


def _policies(recipe: Recipe, unit: str, parameters: dict[str, Any]) -> list[tuple[list[Any], MixedPrecisionPolicy]]:
    """The unit's parameters and dtypes as FSDP2 takes them, group by group. Inputs are cast at the root only: its own casting
    of every unit's inputs would round fp32 positions (by up to 8 at position 4096)."""
    return [
        (
            [parameters[name] for name in group.names],
            MixedPrecisionPolicy(
                param_dtype=dtype_of(group.compute) if group.compute else None,
                reduce_dtype=dtype_of(group.reduce) if group.reduce else None,
                cast_forward_inputs=False,
            ),
        )
        for group in dtype_groups(recipe.params, unit)
    ]


class FSDP2Engine:
    """Handles on a module sharded by :func:`apply_fsdp2`."""

    def __init__(self, module: nn.Module, recipe: Recipe, world: World):
        self.root, self.recipe = module, recipe
        trainable = [name for name, param in recipe.params.items() if param.trainable]
        self._position = {name: i for i, name in enumerate(trainable)}
        self._used = torch.zeros(len(trainable), dtype=torch.uint8)
        self._entered: list[str] = []
        self._groups: list[Any] = []
        self._anchored: set[int] = set()
        self._in_forward = self._in_window = False
        self._sync: bool | None = None  # as set_sync says
        parameters: dict[str, Any] = tensors_of(module, "_parameters")
        whole = [self._position[name] for name in trainable if recipe.params[name].shape == ()]
        self._outside = Outside([parameters[name] for name in trainable], whole, self._used, world)
        self._watch_units(module)
        self._watch_replicated(module, recipe)

    def set_sync(self, sync: bool | None) -> None:
        if sync is not None and not self._in_window:
            self._outside.begin()
        self._sync = sync
        sync = sync is not False  # at the end of each backward is all that FSDP2 knows
        each = self.recipe.sync_every_microbatch
        self.root.set_requires_gradient_sync(sync or bool(each))  # type: ignore[operator]
        if each == "reduce_scatter":
            self.root.set_requires_all_reduce(sync)  # type: ignore[operator]

    def complete(self, place: str) -> None:
        self.set_sync(None)
        if self._in_window:
            self._in_window = False  # the exchange before the step does the rest
        else:
            self._outside.end(place)

    def waits(self) -> bool:
        return self._outside.runs

    def used(self) -> Tensor:
        return self._used

    def entered(self) -> list[str]:
        return self._entered

    def begin(self) -> None:
        self._outside.abandon()
        self._in_window = True
        self._used.zero_()
        self._entered = []

    def abandon(self) -> None:
        self.set_sync(None)
        self._in_window = False
        self._outside.abandon()
        reset_iteration(self.root)
        for group in self._groups:
            drop_partial_gradients(group)

    def drop_gathered(self) -> None:
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def explain(self, error: BaseException) -> ShardwiseError | None:
        if "setStorage" in str(error) and "storage of size 0" in str(error):
            return UnsupportedError(
                "a backward that reaches a unit whose parameters are not gathered",
                why="FSDP2 gathers a unit when backward comes to the tensors it returned; it finds none in an object of "
                "one's own, and a gradient of a gradient (create_graph=True) comes after the unit was freed",
                fix="return tensors, tuples, dicts or dataclasses from each block; for a gradient penalty keep parameters "
                'whole on every rank: sw.init("dp_replicate=-1")',
                name=module_of_error(self.root, error),
            )
        if "got mixed torch.Tensor and DTensor" not in str(error):
            return None
        return UsageError(
            "a parameter of one unit used by code outside that unit",
            why="it is cut over the ranks there: parameters are gathered only while the module of their unit runs",
            fix='let both be in one unit: leave units at "auto", or Sharding(units="none")',
            name=module_of_error(self.root, error),
        )

    def _watch_units(self, root: nn.Module) -> None:
        names = {
            id(t): n for n, o, a in reversed(list(canonical_tensors(root, "_parameters"))) for t in [o._parameters[a]]
        }
        for prefix, child in canonical_modules(root):
            for group in unit_groups(child):
                if any(group is known for known in self._groups):
                    continue
                self._groups.append(group)
                positions = [self._position.get(names[id(param)], -1) for param, _, _ in unit_gradients(group)]
                on_unit_backward(group, self._recorder(positions, prefix), self._refuse_inner_backward(prefix))
                if prefix and any(position >= 0 for position in positions):
                    self._anchored.add(id(group))
            if unit_groups(child):
                child.register_forward_pre_hook(self._entry_recorder(prefix))
                if any(id(group) in self._anchored for group in unit_groups(child)):
                    child.register_forward_pre_hook(anchor_inputs, with_kwargs=True, prepend=True)
            elif any(isinstance(param, DTensor) for param in child._parameters.values()):
                child.register_forward_pre_hook(refuse_ungathered(prefix))
        root.register_forward_pre_hook(lambda *_: self._set_in_forward(True), prepend=True)
        root.register_forward_hook(lambda *_: self._set_in_forward(False), always_call=True)

    def _set_in_forward(self, value: bool) -> None:
        self._in_forward = value

    def _refuse_inner_backward(self, name: str) -> Any:
        def before() -> None:
            if self._in_forward:
                raise UnsupportedError(
                    "a gradient taken inside the model's own forward",
                    why="FSDP2 frees a unit's parameters when its backward ends, and here forward still needs them",
                    fix='keep the parameters whole on every rank: sw.init("dp_replicate=-1")',
                    name=name or None,
                )
            self._begin_backward()

        return before

    def _begin_backward(self) -> None:
        if not self._in_window:
            self._outside.begin_backward(ends=self._sync is None)

    def _recorder(self, positions: list[int], unit: str) -> Any:
        def seen(used: list[int], reduces: bool = False) -> None:
            for i in used:
                self._used[positions[i]] = 1
            if reduces:  # the order of reductions is the same on every rank, or gradients cross
                self._entered.append(f"{unit} (backward)" if unit else "(root) (backward)")

        return seen

    def _entry_recorder(self, name: str) -> Any:
        def entered(_module: nn.Module, _args: Any) -> None:
            if torch.is_grad_enabled():
                self._entered.append(name)

        return entered

    def _watch_replicated(self, root: nn.Module, recipe: Recipe) -> None:
        for name, owner, attr in canonical_tensors(root, "_parameters"):
            position = self._position.get(name)
            if position is not None and not recipe.params[name].cuts:
                param = getattr(owner, attr)
                param.register_hook(before_accumulation(param, self._begin_backward))
                param.register_post_accumulate_grad_hook(mark_used(self._used, position))
