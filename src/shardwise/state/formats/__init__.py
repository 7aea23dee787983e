"""One file per format that weights are stored in: what is in it, where its bytes are, and everything that is refused."""

from shardwise.state.formats.folder import open_folder
from shardwise.state.formats.safetensors import open_safetensors, tensors_in

__all__ = ["open_folder", "open_safetensors", "tensors_in"]
