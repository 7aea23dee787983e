"""Applies data parallelism: shards or full copies, as the recipe says."""

import torch
from torch import nn

from shardwise._torch.fully_shard import has_several_groups
from shardwise.errors import UnsupportedError
from shardwise.model.tensors import give_memory
from shardwise.recipe import Recipe, dtype_groups
from shardwise.techniques.data.fsdp2 import FSDP2Engine, apply_fsdp2
from shardwise.techniques.data.replicas import DDPEngine, apply_ddp
from shardwise.techniques.technique import Act
from shardwise.world import World


class DataAct(Act):
    """The engine of a recipe."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        if not recipe.is_cut or has_several_groups():
            return
        for unit in recipe.units:
            groups = dtype_groups(recipe.params, unit.name)
            if len(groups) > 1:
                raise UnsupportedError(
                    f"a unit of parameters of several dtypes, or cut over several axes, on torch {torch.__version__}",
                    why=f"there FSDP2 has one group of parameters for a unit, of one dtype and one mesh, and {groups[1].names[0]} is of another "
                    f"than {groups[0].names[0]}",
                    fix='take torch 2.12 or newer; or give all parameters one dtype: Precision(storage="fp32"), without parts; or units of modules of '
                    "one dtype: Sharding(units=[...])",
                    name=unit.name or None,
                )

    def shard(self, module: nn.Module, recipe: Recipe, world: World) -> FSDP2Engine | DDPEngine:
        if recipe.is_cut:
            return apply_fsdp2(module, recipe, world)
        give_memory(module, world.device)
        return apply_ddp(module, recipe, world)
