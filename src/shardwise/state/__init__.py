"""State in and out: whole tensors on rank 0, weights as files."""

from shardwise.state.full import full_state_dict, gather_parameter
from shardwise.state.weights import check_dtypes, save_weights, weights_bytes

__all__ = ["check_dtypes", "full_state_dict", "gather_parameter", "save_weights", "weights_bytes"]
