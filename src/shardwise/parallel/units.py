"""Units that only the module itself can tell: by a function of its modules, by ``_no_split_modules``, or by its own
``fully_shard`` method. All become names of modules, so that the recipe stays plain data."""

import copy
import inspect
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise._compat import unit_groups, unit_reshard
from shardwise.anatomy import canonical_modules
from shardwise.config.options import Sharding
from shardwise.errors import ConfigError, PlanError, UsageError
from shardwise.world import World

__all__ = ["with_named_units"]


def with_named_units(module: nn.Module, sharding: Sharding, world: World) -> Sharding:
    """``sharding`` with names in place of a function or of the words ``"no_split"`` and ``"model"``; else as it is.

    Raises:
        PlanError: the function or the hint names no module.
        UsageError: the module has no such hint.
    """
    given: Any = sharding.units
    if callable(given):
        names = tuple(name for name, child in canonical_modules(module) if name and given(name, child))
        if not names:
            raise PlanError(
                f"units={getattr(given, '__name__', given)!r}",
                why="the function is true for no module but the root",
                fix="look at model.named_modules(): it is called with each name and module",
            )
        return msgspec.structs.replace(sharding, units=names)
    if given == "no_split":
        return msgspec.structs.replace(sharding, units=_no_split(module))
    return _of_the_model(module, sharding, world) if given == "model" else sharding


def _no_split(module: nn.Module) -> tuple[str, ...]:
    """Names of the modules whose classes the model, or a model inside it, lists as not to be split (a Hugging Face
    convention); outermost ones, since a part of one is not split either."""
    hinted = {cls for child in module.modules() for cls in (getattr(child, "_no_split_modules", None) or ())}
    if not hinted:
        raise UsageError(
            f"units='no_split' for {type(module).__name__}",
            why="neither it nor a module in it has a list _no_split_modules",
            fix='use units="auto", or name classes: units=("Block",)',
        )
    names = [name for name, child in canonical_modules(module) if name and type(child).__name__ in hinted]
    if not names:
        raise PlanError(
            f"units='no_split' for {type(module).__name__}",
            why=f"no module is of a class in _no_split_modules ({', '.join(sorted(hinted))})",
            fix='use units="auto", or name classes that are there',
        )
    return tuple(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))


def _of_the_model(module: nn.Module, sharding: Sharding, world: World) -> Sharding:
    """What the model's own ``fully_shard(**options)`` shards, seen on a copy without values; its choice of
    ``reshard_after_forward`` for each is kept."""
    if not callable(getattr(module, "fully_shard", None)):
        raise UsageError(
            f"units='model' for {type(module).__name__}",
            why="it has no method fully_shard that says what its units are",
            fix='use units="auto", or write one that calls torch\'s fully_shard on its blocks with the options it is given',
        )
    if sharding.reshard_after_forward is not True or sharding.reshard_every != 1:
        raise ConfigError(
            "Sharding(units='model') with reshard_after_forward or reshard_every",
            why="the model's own fully_shard says for each unit when it is freed, so they would have no effect",
            fix="leave them out, or use other units",
        )
    twin = _without_values(module)
    mesh = world.mesh if world.layout.dp_replicate > 1 else world.mesh["dp_shard"]
    _call_with_known(twin.fully_shard, mesh=mesh, reshard_after_forward=True)  # type: ignore[arg-type]
    found = {name: unit_reshard(child) for name, child in canonical_modules(twin) if name and _is_unit(child)}
    if not found:
        raise PlanError(
            f"units='model' for {type(module).__name__}",
            why="its method fully_shard sharded none of its modules (a base class's, perhaps, that only warns)",
            fix='use units="auto", or let it call fully_shard on its blocks',
        )
    return msgspec.structs.replace(sharding, units=tuple(found), reshard_after_forward=found)


def _is_unit(child: nn.Module) -> bool:
    return isinstance(child, FSDPModule) and bool(unit_groups(child))


def _without_values(module: nn.Module) -> Any:
    """A copy on meta: parameters and buffers are replaced while copying, so that none is copied for real."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(bare, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
        )
    return copy.deepcopy(module, memo)


def _call_with_known(function: Any, **options: Any) -> None:
    """Calls with those of ``options`` that the function's signature has room for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in parameters}
    function(**{key: value for key, value in options.items() if takes_all or key in known})
