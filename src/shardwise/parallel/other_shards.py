"""Refuses shards that are not this rank's. ``torch.save(model.state_dict(), path)`` on rank 0 writes its shards as tensors of the whole shape,
and every rank that loads the file would get them for its own: torch compares shapes alone. So tensors that ``state_dict()`` gives are
marked with their place, which files keep, and what is loaded is compared."""

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import UsageError

_MARK = "_shardwise_place"
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch_state_dicts(module: nn.Module) -> None:
    """Makes ``load_state_dict`` raise UsageError, of a module with shards and of all modules in it: for shards of another rank, and for
    full tensors, of which torch's own message would be a line per parameter, after the buffers have been written."""
    for child in module.modules():
        if any(isinstance(param, DTensor) for param in child.parameters()):
            child.register_state_dict_post_hook(_mark_parameters)
            child.register_load_state_dict_pre_hook(_check_parameters)


def watch_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """The same for an optimizer of such a module, and for the state that it has by now. Idempotent."""
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    for param, values in optimizer.state.items():
        _check_state(param, values)
    optimizer.register_state_dict_post_hook(functools.partial(_each_state, call=_mark_state))
    optimizer.register_load_state_dict_pre_hook(functools.partial(_each_state, call=_check_state))


def _place(param: DTensor) -> tuple[tuple[int, int], ...]:
    """Dim of the mesh and coordinate in it, of each that ``param`` is cut over."""
    at = param.device_mesh.get_coordinate() or ()
    return tuple((dim, at[dim]) for dim, placement in enumerate(param.placements) if not placement.is_replicate())


def _mark(param: Any, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(param, DTensor) and isinstance(value, DTensor) and value is not param:
            setattr(value, _MARK, _place(param))


def _refuse_other(param: Any, value: Any, name: str | None, what: str, fix: str) -> None:
    if isinstance(param, DTensor) and getattr(value, _MARK, place := _place(param)) != place:
        raise UsageError(
            f"{what} with shards of another rank",
            why="the file was written by torch.save on one rank, or by another rank than reads it: it has that rank's shards, and those of the "
            "others are not in it",
            fix=fix,
            name=name,
        )


def _mark_parameters(module: nn.Module, state: Mapping[str, Any], prefix: str, _: Any) -> None:
    for name, param in module.named_parameters(prefix.removesuffix("."), recurse=False, remove_duplicate=False):
        _mark(param, [state.get(name)])


def _check_parameters(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        given = state.get(name)
        if isinstance(param, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
            raise UsageError(
                "load_state_dict of whole tensors into a sharded module",
                why="each rank has a shard of this parameter, and torch does not cut",
                fix="call sw.load_full_state_dict(model, state) on every rank, or sw.load_weights(model, path)",
                name=name,
            )
        _refuse_other(
            param,
            given,
            name,
            "load_state_dict",
            "save sw.full_state_dict(model), or by sw.save_weights(model, path), on every rank",
        )


def _each_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, call: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, values in state.get("state", {}).items():
        if isinstance(number, int) and number < len(params):
            call(params[number], values)


def _mark_state(param: Any, values: Any) -> None:
    _mark(param, values.values() if isinstance(values, Mapping) else ())


def _check_state(param: Any, values: Any) -> None:
    for value in values.values() if isinstance(values, Mapping) else ():
        _refuse_other(
            param, value, None, "an optimizer's state", "save sw.full_optimizer_state_dict(model, optim), on every rank"
        )
