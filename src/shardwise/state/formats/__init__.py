"""Readers for weight file formats, one file each: the tensors in a file, the places of their bytes, and what is
refused."""

from shardwise.state.formats.dcp import METADATA, open_dcp
from shardwise.state.formats.folder import open_folder
from shardwise.state.formats.safetensors import looks_like_safetensors, open_safetensors, tensors_in
from shardwise.state.formats.torch_file import looks_like_torch, open_torch_file

__all__ = [
    "METADATA",
    "looks_like_safetensors",
    "looks_like_torch",
    "open_dcp",
    "open_folder",
    "open_safetensors",
    "open_torch_file",
    "tensors_in",
]
