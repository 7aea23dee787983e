"""The recipe: which bytes of which tensor each rank holds, as frozen data without torch."""

from shardwise.recipe.check import check_param
from shardwise.recipe.cuts import Slice, extents, local_shape, owners
from shardwise.recipe.describe import describe_recipe
from shardwise.recipe.draft import Draft, fingerprint_of
from shardwise.recipe.dtypes import DtypeGroup, dtype_groups
from shardwise.recipe.recipe import RankView, Recipe, check_recipe
from shardwise.recipe.records import (
    DTYPE_BYTES,
    ROOT,
    Anatomy,
    BlockList,
    Buffer,
    Codec,
    Cut,
    Edit,
    Note,
    Param,
    Part,
    TensorFact,
    Unit,
    human_bytes,
)

__all__ = [
    "DTYPE_BYTES", "ROOT", "Anatomy", "BlockList", "Buffer", "Codec", "Cut", "Draft", "DtypeGroup", "Edit", "Note",
    "Param", "Part", "RankView", "Recipe", "Slice", "TensorFact", "Unit", "check_param", "check_recipe",
    "describe_recipe", "dtype_groups", "extents", "fingerprint_of", "human_bytes", "local_shape", "owners",
]  # fmt: skip
