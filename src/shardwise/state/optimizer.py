"""Full optimizer state dicts on rank 0, and loading them: keyed by canonical names, never by order.

The form is that of torch's ``get_optimizer_state_dict``: ``{"state": {name: {key: value}}, "param_groups": [{"params":
[name, ...], "lr": ...}]}``. State with the parameter's shape is sharded like it, also in lists, tuples and dicts (histories); everything
else (step counts) is equal on every rank. More entries where there is something: ``rest``, what the optimizer's own ``state_dict`` gives besides, ``class``,
where its groups have keys that it was not built with, and ``shared``, the places of tensors that the state of several parameters has in common.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise.config.keywords import public_call
from shardwise.errors import CheckpointError, UnsupportedError, UsageError
from shardwise.model.large_pages import in_large_pages
from shardwise.model.pytrees import leaves_of
from shardwise.model.tensors import like_parameter, map_contained
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.init.values import scatter_values
from shardwise.parallel.stale import refuse_no_optimizer
from shardwise.state.optimizer_rest import refuse_partial, refuse_whole, rest_of, set_rest
from shardwise.state.report import shortened
from shardwise.state.shared_state import OneForAll, Shared, refuse_other_cuts, shared_places
from shardwise.state.to_rank0 import gather_tensors
from shardwise.world import described
from shardwise.world.collectively import collectively

# Settings that schedulers add to groups, and that torch's optimizers have gained from version to version: they do not
# mean that another optimizer saved the state.
_SAVED_BY_OTHERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
_FLAGS = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"})


@public_call()
def full_optimizer_state_dict(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The full state dict of an optimizer, unsharded, on rank 0's CPU; ``{}`` on the other ranks. All ranks must call
    it.

    Args:
        model: from ``parallelize``.
        optim: built from its parameters; as it is or from :func:`~shardwise.local_optimizer`.

    Raises:
        UsageError: the optimizer has a parameter that is not the model's.
        UnsupportedError: state of a sharded parameter is neither shaped like it nor equal on every rank (Adafactor's
            rows and columns).
        RankError: a rank does not take part.
    """
    runtime = runtime_of(model)
    refuse_no_optimizer(optim, "full_optimizer_state_dict")
    names = names_of(runtime, optim)
    kinds, rest, shared = agreed_state(runtime, optim, "full_optimizer_state_dict, before it is gathered")
    kept = {name: dict(optim.state.get(runtime.parameters[name], {})) for name in kinds}
    cut = [(name, place) for name, places in kinds.items() for place, is_cut in places.items() if is_cut]
    inside = {name: contained(values) for name, values in kept.items()}
    gathered = gather_tensors(runtime, ((name, local_tensor(inside[name][place]).detach()) for name, place in cut))
    whole = dict(zip(cut, gathered, strict=True))
    if not runtime.world.is_main:
        return {}
    one = OneForAll(shared)
    found = {
        name: mapped_state(
            lambda at, x, n=name: one(n, at, lambda: whole[n, at] if kinds[n][at] else _on_cpu(x)), values
        )
        for name, values in kept.items()
        if values
    }
    groups = [settings_of(runtime, group, names) for group in optim.param_groups]
    has_added = any(_added(optim, group) for group in groups)
    return {
        "state": found,
        "param_groups": groups,
        **({} if rest is None else {"rest": rest}),
        **({"class": type(optim).__name__} if has_added else {}),
        **({"shared": shared} if shared else {}),
    }


@public_call()
def load_full_optimizer_state_dict(model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a full optimizer state dict on rank 0 into ``optim`` on all ranks, sharded like the model. All ranks must
    call it; the ``state`` of the others is ignored.

    The optimizer may be new: its state is created here, not copied into existing state. Its parameter groups get the
    settings (learning rate and so on) of the groups that their parameters were in.

    Args:
        model: from ``parallelize``.
        optim: built from its parameters.
        state: from :func:`full_optimizer_state_dict` under any layout, or from torch's ``get_optimizer_state_dict``
            with ``full_state_dict=True``.

    Raises:
        CheckpointError: on every rank; the state is of other parameters, shapes or another optimizer. Nothing has
            changed then.
        UsageError: the optimizer has a parameter that is not the model's.
    """
    runtime = runtime_of(model)
    refuse_no_optimizer(optim, "load_full_optimizer_state_dict")
    world, place = runtime.world, "load_full_optimizer_state_dict, matching names"
    names_of(runtime, optim)  # on every rank: raises for a parameter that is not the model's
    matched = collectively(world, place, lambda: match_state(runtime, optim, state), on_main=True)
    told, settings, rest, shared = world.broadcast(matched)
    inside = {name: contained(values) for name, values in told.items()}
    cut = {place for places in inside.values() for place, value in places.items() if isinstance(value, torch.dtype)}
    stored = _by_canonical_name(runtime, state["state"]) if world.is_main else {}
    values_of = {name: contained(stored[name]) for name in told if name in stored}
    for place in sorted(cut):
        local = {
            name: torch.empty_like(runtime.local_tensor_of(name), dtype=places[place])
            for name, places in inside.items()
            if isinstance(places.get(place), torch.dtype)
        }
        in_large_pages(local.values())
        scatter_values(runtime, lambda name, piece, at=place: values_of[name][at][piece.full_index], local)
        for name, tensor in local.items():
            inside[name][place] = tensor
    made = {name: mapped_state(lambda at, _, n=name: inside[n][at], values) for name, values in told.items()}
    install_state(runtime, optim, made, settings, shared)
    if rest is not None:
        collectively(world, f"{type(optim).__name__}.load_state_dict", lambda: set_rest(runtime, optim, rest))
        install_state(runtime, optim, made, settings, shared, has_rest=True)


def install_state(
    runtime: Runtime,
    optim: torch.optim.Optimizer,
    made: Mapping[str, Mapping[str, Any]],
    settings: Iterable[Mapping[str, Any]],
    shared: Shared = (),
    *,
    has_rest: bool = False,
) -> None:
    """Sets the state of ``optim``: name -> key -> this rank's value, and the settings of each group. Values with the
    shape of this rank's shard belong to the optimizer from here on; others are copied, once for places that are ``shared``. What lies under other
    keys is removed; with ``has_rest`` it stays."""
    one = OneForAll(shared)
    for group, wanted in zip(optim.param_groups, settings, strict=True):
        group.update({key: _as_before(value, group.get(key)) for key, value in wanted.items()})
    for key in [key for key in optim.state if isinstance(key, Tensor) or not has_rest]:
        del optim.state[key]
    for name, values in made.items():
        param = runtime.parameters[name]
        group = next(group for group in optim.param_groups if any(other is param for other in group["params"]))
        optim.state[param] = mapped_state(
            lambda at, x, n=name, p=param, g=group: one(n, at, lambda: _placed(at, x, p, g)), values
        )
    if runtime.shown is not None:
        with runtime.torchs_classes():
            runtime.shown.mark_state(optim)


def names_of(runtime: Runtime, optim: torch.optim.Optimizer) -> list[str]:
    """Canonical names of the optimizer's parameters, in the model's order."""
    known = {id(param): name for name, param in runtime.parameters.items()}
    held = [(number, param) for number, group in enumerate(optim.param_groups) for param in group["params"]]
    for number, param in held:
        if id(param) not in known:
            raise UsageError(
                f"{type(optim).__name__} with a parameter of shape {list(param.shape)} in group {number}",
                why="it is not one of the model's: the optimizer was built before parallelize, or of two models",
                fix="build the optimizer from model.parameters() after parallelize",
            )
    mine = {known[id(param)] for _, param in held}
    return [name for name in runtime.recipe.params if name in mine]


def agreed_state(
    runtime: Runtime, optim: torch.optim.Optimizer, place: str
) -> tuple[dict[str, dict[str, bool]], dict[str, Any] | None, list[list[list[str]]]]:
    """Canonical name -> place of a value in the parameter's state -> whether it is sharded like the parameter, in the model's order;
    :func:`~shardwise.state.optimizer_rest.rest_of` the optimizer; and the places of tensors that parameters share. All ranks must call it.

    Raises:
        UsageError: a parameter is not the model's, or ranks have different state.
        UnsupportedError: state of a sharded parameter is neither shaped like it nor equal on every rank, or two tensors of it share memory;
            or the rest cannot be saved.
    """
    names = names_of(runtime, optim)

    def act() -> tuple[dict[str, dict[str, bool]], dict[str, Any] | None, list[list[list[str]]]]:
        for number, group in enumerate(optim.param_groups):
            for key, value in group.items():
                refuse_partial(value, f"{key!r} of group {number} of {type(optim).__name__}")
        states = {name: optim.state.get(runtime.parameters[name], {}) for name in names}
        kinds = {name: _kinds(runtime, name, values) for name, values in states.items()}
        return kinds, rest_of(runtime, optim), shared_places({n: contained(values) for n, values in states.items()})

    return collectively(
        runtime.world,
        place,
        act,
        same=lambda found: f"{found[0]} {described(found[1])} {found[2]}",
        differ=UsageError(
            "optimizers that keep different state on different ranks",
            why="some parameter was stepped on one rank and not on another",
            fix="let every rank make the same steps",
        ),
    )


def mapped_state(call: Callable[[str, Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with what ``call`` makes of each place, which is a key or lies in the list, tuple or dict there, and value."""
    return {key: map_contained(call, value, str(key)) for key, value in values.items()}


def contained(values: Mapping[str, Any]) -> dict[str, Any]:
    """Place -> value, of the state of a parameter."""
    found: dict[str, Any] = {}
    mapped_state(found.__setitem__, values)
    return found


def _kinds(runtime: Runtime, name: str, values: Mapping[str, Any]) -> dict[str, bool]:
    shape = runtime.local_tensor_of(name).shape
    param = runtime.recipe.params[name]
    found: dict[str, bool] = {}

    def judge(place: str, value: Any) -> None:
        refuse_partial(value, f"optimizer state {place!r}", name)
        is_tensor = isinstance(value, Tensor)
        if place in found or (not is_tensor and any(isinstance(leaf, Tensor) for leaf in leaves_of(value))):
            raise UnsupportedError(
                f"optimizer state {place!r}: {'a ' + type(value).__name__ + ' of tensors' if place not in found else 'two values of that place'}",
                why="values of the parameter's shape are saved, each under its place, from lists, tuples and dicts",
                fix="keep them in a list, or a dict with texts as keys",
                name=name,
            )
        alike = is_tensor and local_tensor(value).shape == shape and len(param.shape) > 0
        if is_tensor and not alike and value.dim() and param.cuts:
            raise UnsupportedError(
                f"optimizer state {place!r} of shape {list(value.shape)}, of a parameter of shape {list(param.shape)}",
                why="it is not shaped like the parameter, so which part of it belongs to which rank is not known",
                fix="use an optimizer that keeps a value for each element (AdamW, SGD), or whole copies: dp_replicate",
                name=name,
            )
        found[place] = alike

    mapped_state(judge, values)
    return found


def settings_of(runtime: Runtime, group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A parameter group as it is saved: its parameters' names, and everything else on the CPU."""
    members = {id(param) for param in group["params"]}
    mine = [name for name in names if id(runtime.parameters[name]) in members]
    rest = {key: _on_cpu(value) for key, value in group.items() if key != "params"}
    return {"params": mine, **rest}


def _on_cpu(value: Any) -> Any:
    return local_tensor(value).detach().cpu().clone() if isinstance(value, Tensor) else value


def _placed(key: str, value: Any, param: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """A value as the optimizer needs it: sharded values like the parameter, step counts on the device that its kernel
    uses."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and not (param.dim() == 0 and key != "step"):
        on_device = group.get("fused") or group.get("capturable")
        return value.to(local_tensor(param).device) if on_device else value.clone()
    local = local_tensor(param)
    is_given_away = value.dim() > 0 and value.shape == local.shape
    return like_parameter(value.to(local.device, copy=not is_given_away), param)


def _as_before(value: Any, own: Any) -> Any:
    """A copy of a setting for this group: groups that share a tensor (a learning rate) would be scheduled together."""
    if isinstance(value, Tensor):
        return value.to(own.device if isinstance(own, Tensor) else value.device, copy=True)
    return copy.deepcopy(value)


# ---- what fits --------------------------------------------------------------------------------------------------


def match_state(
    runtime: Runtime, optim: torch.optim.Optimizer, state: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], Any, list[list[list[str]]]]:
    """Checks that a full state fits an optimizer: name -> key -> the value, or only the dtype of a sharded one; the
    settings of each group; the rest; and the places that are shared, by the names of this model.

    Args:
        state: from :func:`full_optimizer_state_dict`; of sharded tensors only shapes and dtypes are used.
    """
    names = names_of(runtime, optim)
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping) or "param_groups" not in state:
        raise CheckpointError(
            "an optimizer state without 'state' and 'param_groups'",
            why="it is not what full_optimizer_state_dict gave",
            fix="pass that, or torch's get_optimizer_state_dict(..., full_state_dict=True)",
        )
    if any(isinstance(name, int) for name in state["state"]):
        raise CheckpointError(
            "an optimizer state that is keyed by number",
            why="numbers follow the order of parameters, which another layout or another order of groups changes",
            fix="save sw.full_optimizer_state_dict(model, optim), which is keyed by name",
        )
    stored = _by_canonical_name(runtime, state["state"])
    strange = [name for name in stored if name not in names]
    if strange:
        raise CheckpointError(
            "optimizer state of parameters that this optimizer does not have",
            why=f"it names {len(strange)} others: {shortened(strange)}",
            fix="build the optimizer from the same parameters as when it was saved",
            name=strange[0],
        )
    told = {name: _values_of(runtime, name, stored[name]) for name in names if name in stored}
    settings = [
        _group_settings(runtime, optim, number, state["param_groups"], state.get("class"))
        for number in range(len(optim.param_groups))
    ]
    if (rest := state.get("rest")) is not None:
        refuse_whole(runtime, rest)
    homes = _homes(runtime)
    shared = [[[homes.get(name, name), place] for name, place in group] for group in state.get("shared", ())]
    cut = ((n, at) for n, values in told.items() for at, x in contained(values).items() if isinstance(x, torch.dtype))
    refuse_other_cuts(runtime, shared, cut)
    return told, settings, rest, shared


def _by_canonical_name(runtime: Runtime, stored: Mapping[str, Any]) -> dict[str, Any]:
    homes = _homes(runtime)
    return {homes.get(name, name): values for name, values in stored.items()}


def _homes(runtime: Runtime) -> dict[str, str]:
    """Another name of a parameter -> its canonical one."""
    return {alias: name for name, param in runtime.recipe.params.items() for alias in param.aliases}


def _values_of(runtime: Runtime, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    shape = runtime.recipe.params[name].shape

    def judged(place: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if tuple(value.shape) == shape:
            return value.dtype
        if not runtime.recipe.params[name].cuts:
            return value  # of another shape (Adafactor's rows), equal on every rank
        raise CheckpointError(
            f"optimizer state {place!r} of shape {list(value.shape)}",
            why=f"the parameter has {list(shape)} and is cut over the ranks, so which part belongs where is not known",
            fix="use the state that was saved with this model; one of another shape (Adafactor) needs dp_replicate",
            name=name,
        )

    return mapped_state(judged, values)


def _group_settings(
    runtime: Runtime,
    optim: torch.optim.Optimizer,
    number: int,
    saved: Iterable[Mapping[str, Any]],
    saved_by: str | None,
) -> dict[str, Any]:
    """The settings for one group of ``optim``: those of the saved groups that its parameters were in. ``saved_by``: the class whose
    groups they are, where it is known: what that has added to them while it stepped (Prodigy's ``d_hat``) is taken."""
    group = optim.param_groups[number]
    members = {id(param) for param in group["params"]}
    names = [name for name, param in runtime.parameters.items() if id(param) in members]
    homes = _homes(runtime)
    found: list[dict[str, Any]] = []
    placed: set[str] = set()
    for other in saved:
        theirs = {homes.get(name, name) for name in other["params"]}
        if theirs & set(names):
            placed |= theirs
            found.append({key: value for key, value in other.items() if key not in ("params", "param_names")})
    lost = [name for name in names if name not in placed]
    if lost:
        raise CheckpointError(
            f"an optimizer state without {len(lost)} parameters of group {number}: {shortened(lost)}",
            why="no saved group holds them, so their settings are not known",
            fix="build the optimizer from the same parameters as when it was saved",
            name=lost[0],
        )
    if any(described(other) != described(found[0]) for other in found):
        raise CheckpointError(
            f"group {number} of {type(optim).__name__}",
            why="its parameters were in groups with different settings when the state was saved",
            fix="make the same groups as then",
            name=names[0],
        )
    wanted = found[0] if found else {}
    own = set(group) - {"params", "param_names"}
    differ = own - set(wanted) if saved_by == type(optim).__name__ else own ^ set(wanted)
    if found and differ - _SAVED_BY_OTHERS - _FLAGS:
        raise CheckpointError(
            f"an optimizer state with other settings than {type(optim).__name__} has: {shortened(sorted(differ))}",
            why="it was saved by another optimizer, whose state means something else",
            fix="build the optimizer that it was saved from; what it adds while it steps, before: optim.param_groups[0][name] = 0.0",
        )
    return wanted


def _added(optim: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str]:
    """Keys of a group that its optimizer was not built with."""
    return set(group) - {"params", "param_names"} - set(optim.defaults) - _SAVED_BY_OTHERS - _FLAGS
