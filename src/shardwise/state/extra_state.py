"""The extra state of modules (``get_extra_state`` and ``set_extra_state``), which is not tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.model import canonical_modules
from shardwise.model.own_state import EXTRA_STATE, ExtraState
from shardwise.parallel import runtime_of
from shardwise.state.own_values import own_of


def extra_names(model: nn.Module) -> dict[str, nn.Module]:
    """Key in the state dict -> module, for the modules that define ``get_extra_state``."""
    return {
        f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: module
        for prefix, module in canonical_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Key in the state dict -> what the module's ``get_extra_state`` returns. Must run on every rank: it may
    communicate. And what modules put into the state dict themselves that is no tensor."""
    found = {name: module.get_extra_state() for name, module in extra_names(model).items()}
    runtime = runtime_of(model)
    state = {} if runtime.own_state is None else own_of(runtime).encode(model).state
    return found | {n: value for n, value in state.items() if not isinstance(value, Tensor | ExtraState)}


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Calls ``set_extra_state`` of every module in ``states`` with its state."""
    for name, module in extra_names(model).items():
        if name in states:
            module.set_extra_state(states[name])
