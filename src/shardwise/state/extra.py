"""What modules keep beside tensors, by ``get_extra_state`` and ``set_extra_state``."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.model import canonical_modules

__all__ = ["EXTRA_STATE", "extra_names", "extra_states", "set_extra_states"]

EXTRA_STATE = "_extra_state"  # key of what get_extra_state returns, after the module's name


def extra_names(model: nn.Module) -> dict[str, nn.Module]:
    """Key in the state dict -> module, of those that define ``get_extra_state``."""
    return {
        f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: module
        for prefix, module in canonical_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Key in the state dict -> what the module returns. On every rank: one may talk to the others."""
    return {name: module.get_extra_state() for name, module in extra_names(model).items()}


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Gives every module of ``states`` its own back."""
    for name, module in extra_names(model).items():
        if name in states:
            module.set_extra_state(states[name])
