"""``sw.init`` and ``sw.parallelize``: apply the techniques to a module in order; the run-time object of the result."""

from shardwise.parallel.compose import apply_recipe, describe, parallelize, recipe_of, shard, world_of
from shardwise.parallel.runtime import Runtime, runtime_of

__all__ = ["Runtime", "apply_recipe", "describe", "parallelize", "recipe_of", "runtime_of", "shard", "world_of"]
