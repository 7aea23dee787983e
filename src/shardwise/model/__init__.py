"""Reading a module: its names, tensors and ties, block lists, and the nested inputs and outputs of its forward."""

from shardwise.model.names import canonical_modules, canonical_name, canonical_tensors, module_of_error
from shardwise.model.read import dtype_name, dtype_of, is_pretrained, read_anatomy, refuse_lazy, user_class

__all__ = [
    "canonical_modules", "canonical_name", "canonical_tensors", "dtype_name", "dtype_of", "is_pretrained",
    "module_of_error", "read_anatomy", "refuse_lazy", "user_class",
]  # fmt: skip
