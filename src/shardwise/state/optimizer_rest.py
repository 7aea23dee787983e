"""What the ``state_dict`` of an optimizer holds besides the state of its parameters and the settings of its groups: a count in an
attribute, the averages of a wrapper, state under a key that is no parameter. It goes back through the optimizer's ``load_state_dict``.

A *rest* has that state dict, as ``given``. Where this holds the state and groups of the optimizer's own parameters, by number as torch
writes them, only keys of ``state`` that are no numbers are left, and ``param_groups`` is None. ``whole``: shapes of the parameters that
were not cut: a tensor of such a shape may be a parameter's.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.parallel import Runtime
from shardwise.parallel.part_values import cut_of_part
from shardwise.state.shared_state import memory_of
from shardwise.world import described

_FORM = {"state", "param_groups"}
_KEEP = (
    "keep it in optim.state[param], by the parameters: it is saved by their names then, and cut as they are; a wrapper shares the state "
    "of the optimizer that it wraps, self.state = self.base.state, here and in its load_state_dict"
)


def rest_of(runtime: Runtime, optim: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The rest of an optimizer's state, on the CPU; None: there is none."""
    known = _numbered(optim)
    known["memory"] = {memory_of(value) for _, value in _tensors(known["state"], "")} - {0}
    params = [param for group in optim.param_groups for param in group["params"]]
    others = {key: value for key, value in optim.state.items() if not isinstance(key, Tensor)}
    # With state of a parameter that was taken out of the groups torch's own would fail.
    removed = {key: optim.state.pop(key) for key in optim.state.keys() - set(params) if isinstance(key, Tensor)}
    try:
        given = optim.state_dict()
    finally:
        optim.state.update(removed)
    _refuse_clash(optim, others, len(params))
    names = {id(param): name for name, param in runtime.parameters.items()}
    if isinstance(given, Mapping) and given.keys() >= _FORM and isinstance(given["state"], Mapping):
        _refuse_unknown_state(optim, given, known, [names[id(param)] for param in params])
        found = {key: _without(value, known, str(key)) for key, value in given.items() if key not in _FORM}
        rest = {"state": _of_no_number(given["state"], known, "state"), "param_groups": None, **found}
    else:
        rest = _without(given, known, "state_dict()")
    if isinstance(rest, dict) and rest.keys() == _FORM and not rest["state"]:
        return None
    return {
        "given": rest,
        "whole": sorted({tuple(param.shape) for param in runtime.recipe.params.values() if not param.cuts}),
    }


def set_rest(runtime: Runtime, optim: torch.optim.Optimizer, rest: Mapping[str, Any]) -> None:
    """Gives an optimizer, which has the state of its parameters already, the rest. Its ``load_state_dict`` may cast that state: it is
    to be set again."""
    optim.load_state_dict(_filled(rest["given"], _numbered(optim), runtime.world.device))


def refuse_whole(runtime: Runtime, rest: Mapping[str, Any]) -> None:
    """Refuses whole tensors of parameters that are cut in this run: an optimizer would compute with them beside shards."""
    cut = {param.shape for param in runtime.recipe.params.values() if param.cuts}
    shapes = {tuple(shape) for shape in rest["whole"]} & cut - {()}
    place, tensor = next(((at, x) for at, x in _tensors(rest["given"], "") if tuple(x.shape) in shapes), ("", None))
    if tensor is not None:
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} in what an optimizer keeps besides the state of its parameters",
            why="parameters of this shape are cut over the ranks here, and were not where it was saved: of which it is does not show",
            fix=f"use the layout that it was saved under; or {_KEEP}",
            name=place,
        )


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, f"{place}/{key}" if place else str(key))


def refuse_partial(value: Any, place: str, name: str | None = None) -> None:
    """Refuses a number that each rank has a share of, in the state of an optimizer or in its groups."""
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        raise UnsupportedError(
            f"{place}: a DTensor of shape {list(value.shape)} whose sum over the ranks is not taken",
            why="each rank has a share of it, and one value is saved for all",
            fix="let the optimizer keep the value itself: number = number.full_tensor(), right where it is computed",
            name=name,
        )


def _numbered(optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The state and groups by number, as torch's ``state_dict`` gives them, without what lies under other keys."""
    params = [param for group in optim.param_groups for param in group["params"]]
    numbers = {id(param): number for number, param in enumerate(params)}
    return {
        "state": {number: optim.state[param] for number, param in enumerate(params) if param in optim.state},
        "param_groups": [
            {**group, "params": [numbers[id(param)] for param in group["params"]]} for group in optim.param_groups
        ],
    }


def _refuse_clash(optim: torch.optim.Optimizer, others: Mapping[Any, Any], num_params: int) -> None:
    clash = next((key for key in others if type(key) is int and 0 <= key < num_params), None)
    if clash is not None:
        raise UnsupportedError(
            f"{type(optim).__name__}: state under the key {clash}",
            why="torch's state_dict() has the state of a parameter under this number, and one of the two is lost",
            fix="use a text as key: self.state['all']",
        )


def _refuse_unknown_state(
    optim: torch.optim.Optimizer, given: Mapping[str, Any], known: Mapping[str, Any], names: list[str]
) -> None:
    for number, (theirs, group) in enumerate(zip(given["param_groups"], optim.param_groups, strict=False)):
        if theirs.keys() - group.keys():
            raise UnsupportedError(
                f"{type(optim).__name__}.state_dict() with {min(theirs.keys() - group.keys())!r} of group {number}",
                why="optim.param_groups has no such key, and that is what is saved",
                fix=f"keep it there: self.param_groups[{number}][name] = value",
            )
    for number, values in given["state"].items():
        if type(number) is not int or not isinstance(values, Mapping) or not 0 <= number < len(names):
            continue
        more = [key for key in values if key not in known["state"].get(number, ())]
        if more:
            raise UnsupportedError(
                f"{type(optim).__name__}.state_dict() with {more[0]!r} of a parameter",
                why="optim.state[param] has no such key, and that is what is saved",
                fix=_KEEP,
                name=names[number],
            )


def _is_numbered(value: Mapping[Any, Any], known: Mapping[str, Any]) -> bool:
    """Whether a part of a state dict is the state of the optimizer's own parameters: that of a wrapped one that shares it."""
    if not value.keys() >= _FORM or not isinstance(value["state"], Mapping):
        return False
    numbers = {key: values for key, values in value["state"].items() if type(key) is int}
    return (
        numbers.keys() == known["state"].keys()
        and all(values is known["state"][number] for number, values in numbers.items())
        and described(value["param_groups"]) == described(known["param_groups"])
    )


def _of_no_number(state: Mapping[Any, Any], known: Mapping[str, Any], place: str) -> dict[Any, Any]:
    return {k: _without(v, known, f"{place}/{k}") for k, v in state.items() if type(k) is not int}


def _without(value: Any, known: Mapping[str, Any], place: str) -> Any:
    """A copy of a part of a state dict without what is known."""
    if isinstance(value, Tensor):
        if isinstance(value, DTensor) or cut_of_part(value) is not None:
            raise UnsupportedError(
                f"a tensor of shape {list(value.shape)} in what an optimizer's state_dict() gives besides the state of its parameters",
                why="it is cut over the ranks, and of which parameter it is does not show",
                fix=_KEEP,
                name=place,
            )
        if memory_of(value) in known["memory"]:
            raise UnsupportedError(
                f"state_dict()/{place} of an optimizer, which is a tensor of the state of a parameter",
                why="each would be a tensor of its own after it is loaded, and a write into one would not reach the other",
                fix="leave it out there, and take it from optim.state[param] in load_state_dict; or give a copy of it: x.clone()",
                name=place,
            )
        return value.detach().cpu().clone()
    if type(value) in (dict, OrderedDict):
        found = {key: _without(item, known, f"{place}/{key}") for key, item in value.items() if key not in _FORM}
        if _is_numbered(value, known):
            found |= {"state": _of_no_number(value["state"], known, f"{place}/state"), "param_groups": None}
            return found
        rest = {key: _without(item, known, f"{place}/{key}") for key, item in value.items() if key in _FORM}
        return type(value)({key: (found if key in found else rest)[key] for key in value})
    if type(value) in (list, tuple):
        return type(value)(_without(item, known, f"{place}/{i}") for i, item in enumerate(value))
    return value


def _filled(rest: Any, known: Mapping[str, Any], device: torch.device) -> Any:
    if isinstance(rest, Tensor):  # one number counts steps, which torch keeps on the CPU
        return rest.to(device, copy=True) if rest.dim() else rest.clone()
    if isinstance(rest, dict):
        found = {key: _filled(value, known, device) for key, value in rest.items()}
        if rest.keys() >= _FORM and rest["param_groups"] is None:
            return {**found, "state": known["state"] | found["state"], "param_groups": known["param_groups"]}
        return type(rest)(found) if type(rest) in (dict, OrderedDict) else rest
    if type(rest) in (list, tuple):
        return type(rest)(_filled(value, known, device) for value in rest)
    return rest
