"""Checks of parameters of which a rank has a part as a plain tensor, cut by another axis than FSDP2's.

For torch such a tensor is a whole parameter: a state dict would hold this rank's part under the parameter's name, an
optimizer that mixes the elements of a matrix would update the part as if it were the matrix. Both are refused here; what is read of
a part is in :mod:`~shardwise.parallel.part_values`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UnsupportedError, UsageError
from shardwise.model import canonical_tensors
from shardwise.parallel.runtime import Runtime
from shardwise.recipe import Recipe

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


def is_elementwise(optim: torch.optim.Optimizer) -> bool:
    """Whether the update of each element depends only on that element's gradient and state."""
    return type(optim) in ELEMENTWISE


def plain_parts(recipe: Recipe) -> dict[str, str]:
    """The parameters that are cut over an axis along which torch takes a part for a whole, each with the axis."""
    over = ((name, cut.axis) for name, param in recipe.params.items() for cut in param.cuts if cut.axis != "fsdp")
    return dict(over)


def refuse_mixing_optimizer(runtime: Runtime, optim: torch.optim.Optimizer) -> None:
    """Raises UnsupportedError for an optimizer that is not known to be elementwise, with a parameter of ``runtime`` that is a
    plain part."""
    if is_elementwise(optim):
        return
    held = {id(param) for group in optim.param_groups for param in group["params"]}
    for name, axis in plain_parts(runtime.recipe).items():
        if id(runtime.parameters[name]) in held:
            raise UnsupportedError(
                f"{type(optim).__name__} on a parameter that is cut over {axis}",
                why="each rank has a part of it as a tensor of its own, and this optimizer is not known to update each element by "
                "itself: it would update the part as if it were the whole",
                fix=f"use one of {', '.join(cls.__name__ for cls in ELEMENTWISE)}, or a layout without {axis}",
                name=name,
            )


def refuse_gathering(runtime: Runtime) -> None:
    """Raises UnsupportedError for ``sw.gathered`` of a model of which a parameter is a plain part: its modules work on parts."""
    for name, axis in plain_parts(runtime.recipe).items():
        raise UnsupportedError(
            f"sw.gathered(model) of a model that is cut over {axis}",
            why="its layers compute with this rank's part, and their code is set to its sizes: they cannot hold whole parameters",
            fix="values: sw.full_state_dict(model), on every rank; a forward: call the model on every rank",
            name=name,
        )


def refuse_states_of_parts(module: nn.Module, recipe: Recipe) -> None:
    """Makes ``state_dict()`` and ``load_state_dict`` raise UsageError, of a module and of all modules in it that have a plain
    part: torch would save one rank's part under the name of the parameter."""
    parts = plain_parts(recipe)
    owners: dict[int, tuple[nn.Module, str, str]] = {}
    for name, owner, attr in canonical_tensors(module, "_parameters"):
        if name in parts:
            owners.setdefault(id(owner), (owner, attr, parts[name]))
    for owner, attr, axis in owners.values():
        owner.register_state_dict_pre_hook(_refusing_to_save(attr, axis))
        owner.register_load_state_dict_pre_hook(_refusing_to_load(attr, axis))


def _refusing_to_save(attr: str, axis: str) -> Any:
    def check(_module: nn.Module, prefix: str, _keep_vars: bool) -> None:
        raise UsageError(
            f"state_dict() of a model that is cut over {axis}",
            why="each rank has a part of this parameter as a plain tensor, and torch would save it as if it were the whole",
            fix="sw.full_state_dict(model), or sw.save_weights(model, path), on every rank",
            name=f"{prefix}{attr}",
        )

    return check


def _refusing_to_load(attr: str, axis: str) -> Any:
    def check(_module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
        if f"{prefix}{attr}" in state:
            raise UsageError(
                f"load_state_dict into a model that is cut over {axis}",
                why="each rank has a part of this parameter as a plain tensor, and torch does not cut",
                fix="sw.load_full_state_dict(model, state), or sw.load_weights(model, path), on every rank",
                name=f"{prefix}{attr}",
            )

    return check
