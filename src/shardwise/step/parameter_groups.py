"""Parameter groups for an optimizer: those that the model's own method makes, over the parameters of this rank."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.config.suggest import first_few
from shardwise.errors import UsageError
from shardwise.model.calling import methods_called
from shardwise.parallel import runtime_of

_METHOD = "make_parameter_groups"


@public_call({"lr": "give it to the optimizer: torch.optim.AdamW(sw.parameter_groups(model), lr=3e-4)"})
def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The groups that a model wants its optimizer to have: ``torch.optim.AdamW(sw.parameter_groups(model), lr=3e-4)``.

    They are what its method ``make_parameter_groups()`` returns: parameters, or groups of them with options. Where the
    model is wrapped, the outermost modules that have the method are called. Trained parameters of modules without it
    form one more group.

    Args:
        model: from ``parallelize``. The method sees its parameters as shards.

    Returns:
        groups, each a new mapping with a list ``params`` and the options that the method returned for it.

    Raises:
        UsageError: the model was not parallelized, or the method returned something that is not a parameter of the
            model, or one parameter twice.

    Warns:
        UserWarning: trained parameters that the model's method leaves out, which the optimizer will not change.
    """
    runtime_of(model)  # groups made before would hold parameters that sharding replaces
    return grouped(model)


def has_groups(model: nn.Module) -> bool:
    """Whether a model has a method that makes its parameter groups."""
    return bool(methods_called(model, _METHOD))


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of :func:`parameter_groups`, also for a model that was not parallelized."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    methods = methods_called(model, _METHOD)
    for method in methods:
        groups += _groups(method())
    seen: set[int] = set()
    for param in (param for group in groups for param in group["params"]):
        if id(param) not in names or id(param) in seen:
            is_twice = id(param) in seen
            raise UsageError(
                f"{_METHOD}() of {type(model).__name__}",
                why="it returned a parameter twice: it would be stepped twice"
                if is_twice
                else f"it returned what is no parameter of the model, a {type(param).__name__}: perhaps one kept from before parallelize",
                fix="put each in one group"
                if is_twice
                else "make the groups from self.named_parameters() when it is called",
                name=names.get(id(param)),
            )
        seen.add(id(param))
    rest = {names[id(p)]: p for p in model.parameters() if p.requires_grad and id(p) not in seen}
    if rest and methods and getattr(methods[0], "__self__", None) is model:
        warnings.warn(
            f"{_METHOD}() of {type(model).__name__} leaves out {first_few(rest)}, which the optimizer will not change; if that is "
            "meant, call requires_grad_(False) on them before parallelize",
            stacklevel=level_of_caller(),
        )
    elif rest:
        groups.append({"params": list(rest.values())})
    return groups


def _groups(made: Any) -> list[dict[str, Any]]:
    """``made`` as a list of groups; given as torch's optimizers take it: a group, groups, parameters, or named
    parameters."""
    entries: list[Any] = [made] if isinstance(made, Mapping | Tensor) else list(made)
    if not entries or not isinstance(entries[0], Mapping):
        entries = [{"params": entries}]
    return [{**group, "params": _params(group["params"])} for group in entries]


def _params(given: Tensor | Iterable[Any]) -> list[Any]:
    entries = [given] if isinstance(given, Tensor) else list(given)
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
