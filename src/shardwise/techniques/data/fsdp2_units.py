"""The units of a recipe as FSDP2 wraps them: their parameters by group, the options of each, and what it cannot wrap."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardwise._torch.fsdp2 import Unit
from shardwise.errors import UnsupportedError
from shardwise.model import canonical_modules, dtype_of
from shardwise.recipe import ROOT, Cut, Recipe, dtype_groups
from shardwise.techniques.data.passes import Units
from shardwise.techniques.data.rule import DataEntry
from shardwise.world import World


def entry_of(recipe: Recipe) -> DataEntry:
    return recipe.entry("data", DataEntry)


def offload_of(recipe: Recipe, world: World) -> OffloadPolicy:
    """Where shards are kept between uses."""
    said = entry_of(recipe)
    if not said.offload:
        return OffloadPolicy()
    # Page-locked memory needs an accelerator; without one torch fails at the first shard ("Cannot access accelerator
    # device").
    return CPUOffloadPolicy(pin_memory=said.pin_memory and world.device.type != "cpu")


def root_unit(recipe: Recipe) -> Any:
    """The unit of what no other one has."""
    return next(unit for unit in recipe.units if unit.name == ROOT)


def refuse_other_cuts(recipe: Recipe) -> None:
    """Raises UnsupportedError for cuts that ``fully_shard`` does not make."""
    for name, param in recipe.params.items():
        has_rows = bool(param.shape) and 0 not in param.shape
        last = param.cuts[-1:]
        if last not in ([(Cut(axis=axis, dim=0),) for axis in ("fsdp", "efsdp")] if has_rows else [()]):
            raise UnsupportedError(
                f"cuts {param.cuts} of a tensor of shape {param.shape}",
                why="fully_shard cuts dim 0 of what other cuts have left over fsdp, or efsdp, and keeps 0-dim tensors whole",
                fix="use the recipe that make_recipe makes",
                name=name,
            )


def refuse_containers(modules: dict[str, nn.Module], names: tuple[str, ...]) -> None:
    """Raises UnsupportedError for a list or dict of modules as a unit."""
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


def groups_of(
    recipe: Recipe, unit: str, parameters: dict[str, Any], world: World
) -> list[tuple[list[Any], DeviceMesh, MixedPrecisionPolicy]]:
    """The unit's parameters, group by group, each with its mesh and its FSDP2 mixed precision policy. Inputs are cast at the
    root only: FSDP2's casting of every unit's inputs would round fp32 positions (by up to 8 at position 4096)."""
    return [
        (
            [parameters[name] for name in group.names],
            world.sharding_mesh(group.axis),
            MixedPrecisionPolicy(
                param_dtype=dtype_of(group.compute) if group.compute else None,
                reduce_dtype=dtype_of(group.reduce) if group.reduce else None,
                cast_forward_inputs=False,
            ),
        )
        for group in dtype_groups(recipe.params, unit)
    ]


def units_of(module: nn.Module, recipe: Recipe, parameters: Mapping[str, Any]) -> Units:
    modules = dict(canonical_modules(module))
    records = [unit for unit in recipe.units if unit.name != ROOT]
    inner = [
        Unit(unit.name, list({id(m): m for m in map(modules.__getitem__, unit.modules)}.values())) for unit in records
    ]
    numbers: dict[str, int] = {unit.name: i for i, unit in enumerate(records)}
    ahead: dict[int | None, list[int]] = {}
    behind: dict[int | None, list[int]] = {}
    for unit in recipe.units:
        number = numbers.get(unit.name)
        ahead[number] = [numbers[name] for name in unit.prefetch_forward]
        if unit.prefetch_backward is not None:
            behind[number] = [numbers[name] for name in unit.prefetch_backward]
    names = {id(param): name for name, param in parameters.items()}
    return Units(Unit(ROOT, [module]), inner, ahead, behind, names, _spanning(records, list(modules)))


def _spanning(units: Sequence[Any], order: list[str]) -> set[int]:
    """Numbers of the units that have a module of another unit between their own modules."""
    place = {name: i for i, name in enumerate(order)}
    ends = [(min(map(place.__getitem__, u.modules)), max(map(place.__getitem__, u.modules))) for u in units]
    between = (
        (i, place[name])
        for i, _ in enumerate(units)
        for j, other in enumerate(units)
        if i != j
        for name in other.modules
    )
    return {i for i, at in between if ends[i][0] < at < ends[i][1]}


def leave_unflattened(module: nn.Module) -> None:
    """Disables ``flatten_parameters`` of recurrent layers. It moves gathered weights into one block of memory for cuDNN
    once, through ``.data``; later all-gathers do not write there, so from the second step on the layer computed with
    the first step's weights."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase) and any(isinstance(param, DTensor) for param in child.parameters()):
            child.__dict__["flatten_parameters"] = _nothing
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")


def _nothing() -> None:
    pass
