"""Applies data parallelism: shards or full copies, as the recipe says."""

from torch import nn

from shardwise.model.tensors import give_memory
from shardwise.recipe import Recipe
from shardwise.techniques.data.fsdp2 import FSDP2Engine, apply_fsdp2
from shardwise.techniques.data.replicas import DDPEngine, apply_ddp
from shardwise.techniques.technique import Act
from shardwise.world import World


class DataAct(Act):
    def shard(self, module: nn.Module, recipe: Recipe, world: World) -> FSDP2Engine | DDPEngine:
        if recipe.is_cut:
            return apply_fsdp2(module, recipe, world)
        give_memory(module, world.device)
        return apply_ddp(module, recipe, world)
