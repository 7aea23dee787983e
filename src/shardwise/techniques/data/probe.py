"""Facts for data parallelism that only the module itself can give. Units: from a function of its modules, from
``_no_split_modules``, or from its own ``fully_shard`` method; all become names of modules, so that the recipe stays
plain data. And which modules have state that depends on how many forwards a rank runs."""

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwise._torch.fully_shard import unit_groups, unit_policies, unit_reshard
from shardwise._torch.modules import BatchNormBase, is_spectral_norm
from shardwise.config.caller import level_of_caller
from shardwise.config.suggest import first_few
from shardwise.errors import ConfigError, PlanError, ShardwiseError, UsageError
from shardwise.model import canonical_modules, dtype_of
from shardwise.model.tensors import parameter_like
from shardwise.recipe import Draft
from shardwise.recipe.draft import Casting
from shardwise.techniques.data.options import DDP, Sharding
from shardwise.world import World


def probe(
    module: nn.Module, example: Any, draft: Draft, world: World, *, sharding: Sharding, ddp: DDP
) -> dict[str, Any]:
    """Facts about ``module`` that the rule of data parallelism needs.

    Args:
        module: on meta or not.
        example: not used.
        draft: with dtypes, for a model that shards itself.
        world: the world, for a model that shards itself.
        sharding: the options.
        ddp: not read.

    Returns:
        ``units``, ``reshard``, ``advancing``, ``statistics``: see :func:`shardwise.techniques.data.rule.rule`.

    Raises:
        ConfigError: a model that shards itself does not do it as the options say, or the options cannot say it.
        PlanError: the function or the hint names no module.
        UsageError: the module has no such hint, or its own method failed.
    """
    return {
        **_units(module, draft, world, sharding),
        "advancing": _advancing(module),
        "statistics": _statistics(module),
    }


def _units(module: nn.Module, draft: Draft, world: World, sharding: Sharding) -> dict[str, Any]:
    """Names of modules for a function, ``"no_split"`` or ``"model"`` as ``units``; otherwise an empty dict."""
    given: Any = sharding.units
    if callable(given):
        names = tuple(name for name, child in canonical_modules(module) if name and given(name, child))
        if not names:
            raise PlanError(
                f"units={getattr(given, '__name__', given)!r}",
                why="the function is true for no module but the root",
                fix="look at model.named_modules(): it is called with each name and module",
            )
        return {"units": names}
    if given == "no_split":
        return {"units": _no_split(module)}
    return _of_the_model(module, draft, sharding, world) if given == "model" else {}


def _advancing(module: nn.Module) -> list[str]:
    """Modules with a spectral norm, whose power iteration every forward advances."""
    return list(
        dict.fromkeys(
            name.partition(".parametrizations.")[0].removesuffix(".parametrizations")
            for name, child in canonical_modules(module)
            if is_spectral_norm(child)
        )
    )


def _statistics(module: nn.Module) -> list[str]:
    return [
        name
        for name, child in canonical_modules(module)
        if isinstance(child, BatchNormBase) and child.track_running_stats and (child.training or not module.training)
    ]


def _no_split(module: nn.Module) -> tuple[str, ...]:
    """Names of the modules whose classes the model, or a model inside it, lists as not to be split (a Hugging Face
    convention). Only outermost ones, since a part of one is not split either."""
    children: Iterable[Any] = module.modules()
    hinted = {cls for child in children for cls in (getattr(child, "_no_split_modules", None) or ())}
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


def _of_the_model(module: nn.Module, draft: Draft, sharding: Sharding, world: World) -> dict[str, Any]:
    """The modules that the model's own ``fully_shard(**options)`` shards, found on a copy without values, with its
    choice of ``reshard_after_forward`` for each."""
    if not callable(getattr(module, "fully_shard", None)):
        raise UsageError(
            f"units='model' for {type(module).__name__}",
            why="it has no method fully_shard that says what its units are",
            fix='use units="auto", or write one that calls torch\'s fully_shard on its blocks with the options it is given',
        )
    if isinstance(sharding.reshard_after_forward, dict) or sharding.reshard_every != 1:
        raise ConfigError(
            "Sharding(units='model') with reshard_every, or reshard_after_forward per pattern",
            why="the model's own fully_shard says for each unit when it is freed, so they would have no effect",
            fix="give reshard_after_forward one value, which its method is given, or use other units",
        )
    twin, options = _without_values(module), _options(sharding, draft.casting, world)
    taken = _call_with_known(twin, options)
    found = {name: child for name, child in canonical_modules(twin) if name and _is_unit(child)}
    if not found:
        raise PlanError(
            f"units='model' for {type(module).__name__}",
            why="its method fully_shard sharded none of its modules (a base class's, perhaps, that only warns)",
            fix='use units="auto", or let it call fully_shard on its blocks',
        )
    for name, child in found.items():
        _refuse_other_policies(name, child, options, draft.casting_in(name))
    _warn_of_dropped(found, options, taken)
    _warn_of_other_cuts(found)
    freed = {name: unit_reshard(child) for name, child in found.items()}
    # With one shard the engine may be DDP, which frees nothing: a note says so.
    size = world.layout.degree("fsdp")
    if size > 1 or sharding.engine == "fsdp2":
        _warn_of_dropped_reshard(freed, options["reshard_after_forward"], taken, size)
    if size == 1 and not isinstance(sharding.reshard_after_forward, bool):
        freed = dict.fromkeys(freed, sharding.reshard_after_forward)  # it has no effect here, which a note says
    return {"units": tuple(found), "reshard": freed}


def _options(sharding: Sharding, casting: Casting, world: World) -> dict[str, Any]:
    """Keyword arguments of torch's ``fully_shard`` for the units of this model."""
    pin = sharding.pin_memory and world.device.type != "cpu"
    reshard: Any = sharding.reshard_after_forward
    return {
        "mesh": world.sharding_mesh(),
        "reshard_after_forward": reshard if isinstance(reshard, bool) or world.layout.degree("fsdp") > 1 else True,
        "mp_policy": _policy(casting),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if sharding.offload else OffloadPolicy(),
    }


def _policy(casting: Casting) -> MixedPrecisionPolicy:
    compute, reduce = (dtype_of(word) if word else None for word in (casting.compute, casting.reduce))
    return MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=casting.cast_inputs == "units"
    )


def _refuse_other_policies(name: str, child: nn.Module, options: dict[str, Any], part: Casting | None) -> None:
    """Refuses a policy of the model's own that differs from the given one: it would have no effect. torch's defaults
    are accepted."""
    casts, offload = unit_policies(child)
    given, plain = options["mp_policy"], MixedPrecisionPolicy()
    # torch casts the inputs of units by default, so only not casting them is a choice. Parts always cast theirs.
    cast = casts.cast_forward_inputs and given.cast_forward_inputs
    alike = _dtypes(dataclasses.replace(casts, cast_forward_inputs=cast))
    meant = dataclasses.replace(_policy(part), cast_forward_inputs=cast) if part is not None else given
    if casts != plain and alike not in (_dtypes(given), _dtypes(meant)):
        raise ConfigError(
            f"units='model': its fully_shard gives {name!r} {casts}",
            why=f"precision= of parallelize says {given}, and the units are cast by that",
            fix="let fully_shard pass on the mp_policy that it is given, and name modules with a precision of their own there: "
            f'precision=sw.Precision(..., parts={{{name!r}: "fp32"}})',
            name=name,
        )
    if isinstance(offload, CPUOffloadPolicy) and not isinstance(options["offload_policy"], CPUOffloadPolicy):
        raise ConfigError(
            f"units='model': its fully_shard gives {name!r} a CPUOffloadPolicy",
            why="Sharding(offload=False) of parallelize keeps parameters on the device",
            fix="use Sharding(units='model', offload=True), which keeps all of them in host memory",
            name=name,
        )


def _dtypes(policy: MixedPrecisionPolicy) -> tuple[Any, ...]:
    return (
        policy.param_dtype,
        policy.reduce_dtype or policy.param_dtype,
        policy.output_dtype,
        policy.cast_forward_inputs,
    )


def _warn_of_dropped(found: dict[str, Any], options: dict[str, Any], taken: set[str]) -> None:
    """Warns of a policy that the method takes and does not pass to all of its units: it is applied to all anyway."""
    policies = {name: unit_policies(child) for name, child in found.items()}
    for number, key, plain in ((0, "mp_policy", MixedPrecisionPolicy()), (1, "offload_policy", OffloadPolicy())):
        asks = options[key].param_dtype is not None if number == 0 else options[key] != plain
        without = [name for name, given in policies.items() if given[number] == plain]
        if key in taken and asks and without:
            warnings.warn(
                f"units='model': its fully_shard takes {key}, and does not give it to {first_few(without)}, which are treated as the "
                "others are: what parallelize is given holds for the whole model",
                stacklevel=level_of_caller(),
            )


def _warn_of_dropped_reshard(freed: dict[str, bool | int], asked: bool | int, taken: set[str], size: int) -> None:
    """Warns of units that are freed after forward, torch's default, although the options say otherwise."""
    without = [name for name, reshard in freed.items() if reshard is True]
    if asked is True or (asked is not False and asked == size) or not without:
        return
    key = "reshard_after_forward"
    has = f"takes {key}, and does not give it" if key in taken else f"has no parameter {key} to give"
    warnings.warn(
        f"units='model': its fully_shard {has} to {first_few(without)}: {asked} has no effect there, and they are freed after each forward. "
        "Let it pass reshard_after_forward on to torch's fully_shard, or use units= with the classes of its blocks",
        stacklevel=level_of_caller(),
    )


def _warn_of_other_cuts(found: dict[str, Any]) -> None:
    """Warns of parameters that the model keeps whole (``ignored_params``) or cuts along another dim
    (``shard_placement_fn``): all parameters of a unit are cut along their first dim, with the same numbers."""
    whole, other = [], []
    for name, child in found.items():
        for key, param in child.named_parameters():
            if not isinstance(param, DTensor):
                whole.append(f"{name}.{key}")
            elif any(isinstance(placement, Shard) and placement.dim != 0 for placement in param.placements):
                other.append(f"{name}.{key}")
    for names, option, wish in (
        (whole, "ignored_params", "whole on every rank"),
        (other, "shard_placement_fn", "cut along another dim than their first"),
    ):
        if names:
            warnings.warn(
                f"units='model': its fully_shard wants {first_few(names)} {wish} "
                f"({option}); they are cut along their first dim, as all parameters of a unit are. The numbers are the same",
                stacklevel=level_of_caller(),
            )


def _is_unit(child: nn.Module) -> bool:
    return isinstance(child, FSDPModule) and bool(unit_groups(child))


def _without_values(module: nn.Module) -> Any:
    """A copy on meta: parameters and buffers are replaced while copying, so that no values are copied."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            parameter_like(tensor, bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
        )
    return copy.deepcopy(module, memo)


def _call_with_known(twin: Any, options: dict[str, Any]) -> set[str]:
    """Calls the model's ``fully_shard`` with those of ``options`` that its signature has. Returns their names."""
    parameters = inspect.signature(twin.fully_shard).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {key: value for key, value in options.items() if takes_all or key in parameters}
    unknown = [
        name
        for name, p in parameters.items()
        if name not in known and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        raise UsageError(
            f"units='model': fully_shard of {type(twin).__name__} needs {', '.join(unknown)}",
            why=f"it is given {', '.join(options)}, those of them that it has a parameter for",
            fix=f"give {unknown[0]} a default, or use units= with the classes of its blocks",
        )
    try:
        twin.fully_shard(**known)
    except ShardwiseError:
        raise
    except Exception as error:
        raise UsageError(
            f"units='model': fully_shard of {type(twin).__name__}",
            why=f"it raised {type(error).__name__}: {error}",
            fix="see the traceback of that error, above; it was given " + ", ".join(known),
        ) from error
    return set(known)
