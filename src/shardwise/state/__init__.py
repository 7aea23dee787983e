"""Loads and saves the state of a sharded model: full state dicts on rank 0, weight files, checkpoints, conversion."""

from shardwise.state.adapters import check_adapter, load_adapter, save_adapter
from shardwise.state.full import full_state_dict, load_full_state_dict
from shardwise.state.gathered import gathered
from shardwise.state.kinds import StateDictType, load_state_dict, state_dict
from shardwise.state.load import load_weights
from shardwise.state.optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from shardwise.state.report import LoadReport
from shardwise.state.save import check_dtypes, check_packed, save_weights, weights_bytes

__all__ = [
    "LoadReport", "StateDictType", "check_adapter", "check_dtypes", "check_packed", "full_optimizer_state_dict",
    "full_state_dict", "gathered", "load_adapter", "load_full_optimizer_state_dict", "load_full_state_dict",
    "load_state_dict", "load_weights", "save_adapter", "save_weights", "state_dict", "weights_bytes",
]  # fmt: skip
