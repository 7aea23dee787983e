"""Nested containers of tensors."""

from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_map", "tree_unflatten"]
