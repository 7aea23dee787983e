"""``sw.init`` and ``sw.parallelize``: apply the techniques to a module in order; the run-time object of the result."""

from shardwise.model.tensors import bytes_of
from shardwise.parallel.compose import apply_recipe, describe, parallelize, recipe_of, shard, world_of
from shardwise.parallel.large_pages import empty_in_large_pages, in_large_pages
from shardwise.parallel.runtime import Runtime, norm_power_sum, runtime_of

__all__ = [
    "Runtime",
    "apply_recipe",
    "bytes_of",
    "describe",
    "empty_in_large_pages",
    "in_large_pages",
    "norm_power_sum",
    "parallelize",
    "recipe_of",
    "runtime_of",
    "shard",
    "world_of",
]
