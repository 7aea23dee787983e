"""State dicts of a sharded model in three kinds, named as in ``torch.distributed.fsdp.StateDictType``."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType as TorchStateDictType
from torch.distributed.tensor import DTensor

from shardwise._torch.dtensor import local_tensor
from shardwise.config.keywords import public_call
from shardwise.errors import CheckpointError, ConfigError, UnsupportedError
from shardwise.parallel import Runtime, runtime_of
from shardwise.state.extra_state import extra_names, extra_states, set_extra_states
from shardwise.state.full import full_state_dict, load_full_state_dict
from shardwise.state.load_transaction import load_transaction
from shardwise.state.report import LoadReport
from shardwise.world.collectively import collectively

TOPOLOGY = "_shardwise_topology"  # entry of a LOCAL state dict: the topology it belongs to


class StateDictType(StrEnum):
    """The kind of a state dict: full tensors, DTensor shards, or plain local tensors.

    FULL: full tensors on rank 0's CPU, ``{}`` elsewhere; loads under any layout. SHARDED: on every rank, its shards as
    DTensors, as ``model.state_dict()`` returns them; ``torch.distributed.checkpoint`` saves it, and loads it under any
    layout. LOCAL: on every rank, its plain local tensors; loads only under the same topology.
    """

    FULL_STATE_DICT = "FULL_STATE_DICT"
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT"

    @classmethod
    def _missing_(cls, value: object) -> "StateDictType":
        known = ", ".join(kind.value for kind in cls)
        raise ConfigError(f"state dict type {value!r}", why="there is no such type", fix=f"use one of {known}")

    def to_torch(self) -> TorchStateDictType:
        """The member of torch's ``StateDictType`` with the same name."""
        return TorchStateDictType[self.name]


@public_call()
def state_dict(model: nn.Module, kind: str | StateDictType = StateDictType.SHARDED_STATE_DICT) -> dict[str, Any]:
    """The state dict of a sharded model: parameters and persistent buffers by canonical name. For FULL all ranks must
    call it.

    SHARDED and LOCAL tensors share memory with the model. Tied names map to one tensor.

    Args:
        model: from ``parallelize``.
        kind: a :class:`StateDictType`, or its name.

    Raises:
        UnsupportedError: SHARDED, of a model with modules that store something else than they hold.
    """
    kind, runtime = StateDictType(kind), runtime_of(model)
    if kind is StateDictType.FULL_STATE_DICT:
        return full_state_dict(model)
    runtime.check_values()
    found: dict[str, Any] = {}
    sharded = kind is StateDictType.SHARDED_STATE_DICT
    if sharded and runtime.own_state is not None and not runtime.own_state.stores_itself:
        name, methods = next(iter(runtime.own_state.methods.items()))
        raise UnsupportedError(
            f"{kind.value} of a model with {', '.join(methods)}",
            why="it has the shards of what the model holds, and files of it are read as what the module stores",
            fix="use FULL_STATE_DICT, or sw.save_weights(model, folder): both run the method; for a run, sw.CheckpointManager",
            name=name or None,
        )
    for name, tensor in _tensors(runtime).items():
        value = tensor.detach() if sharded else local_tensor(tensor).detach()
        found.update(dict.fromkeys((name, *_aliases(runtime, name)), value))
    found |= extra_states(model)
    if not sharded:
        found[TOPOLOGY] = _topology(runtime)
    return found


@public_call()
def load_state_dict(
    model: nn.Module, state: Mapping[str, Any], kind: str | StateDictType = StateDictType.SHARDED_STATE_DICT
) -> LoadReport:
    """Loads a state dict from :func:`state_dict` of the same ``kind``. All ranks must call it.

    Args:
        model: from ``parallelize``.
        state: the state dict.
        kind: a :class:`StateDictType`, or its name.

    Raises:
        CheckpointError: on every rank; names, shapes or dtypes do not fit, or the topology is not the one it was made
            under. Nothing has changed then.
    """
    kind, runtime = StateDictType(kind), runtime_of(model)
    if kind is StateDictType.FULL_STATE_DICT:
        return load_full_state_dict(model, state)
    tensors = _tensors(runtime)
    place = f"load_state_dict ({kind.value}), checking"
    pairs = collectively(runtime.world, place, lambda: _pairs(runtime, tensors, state, kind))
    with load_transaction(runtime, runtime.local_tensors(), pairs), torch.no_grad():
        for name, value in pairs.items():
            local_tensor(tensors[name]).copy_(local_tensor(value))
    set_extra_states(model, state)
    num_bytes = sum(local_tensor(value).numel() * value.itemsize for value in pairs.values())
    return LoadReport(place=f"a {kind.value}", num_tensors=len(pairs), num_bytes=num_bytes)


def _tensors(runtime: Runtime) -> dict[str, Tensor]:
    local = runtime.local_tensors()
    buffers = {name: local[name] for name, buffer in runtime.recipe.buffers.items() if buffer.persistent}
    return {**runtime.parameters, **buffers}


def _aliases(runtime: Runtime, name: str) -> tuple[str, ...]:
    return (runtime.recipe.params.get(name) or runtime.recipe.buffers[name]).aliases


def _topology(runtime: Runtime) -> dict[str, Any]:
    return {"layout": str(runtime.recipe.grid), "rank": runtime.world.rank, "recipe": runtime.recipe.fingerprint}


def _pairs(
    runtime: Runtime, tensors: Mapping[str, Tensor], state: Mapping[str, Any], kind: StateDictType
) -> dict[str, Tensor]:
    if kind is StateDictType.LOCAL_STATE_DICT:
        here, there = _topology(runtime), state.get(TOPOLOGY)
        if there != here:
            raise CheckpointError(
                f"a {kind.value} of {there}",
                why=f"bare local tensors mean something under the topology they were taken under only; this is {here}",
                fix="use FULL_STATE_DICT, SHARDED_STATE_DICT or sw.save_weights to change the layout",
            )
    extra = extra_names(runtime.module)
    known = set(extra) | {alias for name in tensors for alias in (name, *_aliases(runtime, name))}
    strange = [name for name in state if name not in known and name != TOPOLOGY]
    missing = [name for name in (*tensors, *extra) if name not in state]
    for names, why in ((missing, "it is missing"), (strange, "the model has no such tensor")):
        if names:
            raise CheckpointError(f"a {kind.value}", why=why, fix="use the state of the same model", name=names[0])
    pairs: dict[str, Tensor] = {name: state[name] for name in tensors}
    for name, value in pairs.items():
        own = local_tensor(tensors[name]) if kind is StateDictType.LOCAL_STATE_DICT else tensors[name]
        if _described(value) != _described(own):
            raise CheckpointError(
                f"{_described(value)}",
                why=f"this model has {_described(own)}",
                fix="load a SHARDED_STATE_DICT of another layout with torch.distributed.checkpoint, or use FULL_STATE_DICT",
                name=name,
            )
    return pairs


def _described(tensor: Tensor) -> str:
    cut = f", cut {tensor.placements} over {tuple(tensor.device_mesh.shape)}" if isinstance(tensor, DTensor) else ""
    return f"{tensor.dtype} of shape {list(tensor.shape)}, {list(local_tensor(tensor).shape)} here{cut}"
