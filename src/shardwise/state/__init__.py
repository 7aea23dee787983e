"""State in and out: whole tensors on rank 0, weights from and to files."""

from shardwise.state.full import full_state_dict, gather_parameter
from shardwise.state.load import load_weights
from shardwise.state.report import LoadReport
from shardwise.state.save import check_dtypes, save_weights, weights_bytes

__all__ = [
    "LoadReport",
    "check_dtypes",
    "full_state_dict",
    "gather_parameter",
    "load_weights",
    "save_weights",
    "weights_bytes",
]
