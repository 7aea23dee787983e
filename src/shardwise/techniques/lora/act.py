"""What adapters change in a sharded module: nothing but what is checked here; their tensors are ordinary parameters."""

from torch import nn

from shardwise.errors import UsageError
from shardwise.model.adapted import adapted_layers
from shardwise.recipe import Recipe
from shardwise.techniques.lora.rule import LoRAEntry, own_names
from shardwise.techniques.technique import Act
from shardwise.world import World


class LoRAAct(Act):
    """Checks that the module is the one whose layers the recipe names."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        if "lora" not in recipe.techniques:
            return
        entry = recipe.entry("lora", LoRAEntry)
        missing = [name for name in entry.layers if name not in adapted_layers(module)]
        if missing:
            raise UsageError(
                "a module without the adapters of the recipe",
                why="the recipe was made for a module with them",
                fix="make the recipe from this module: parallelize(..., lora=) does",
                name=missing[0],
            )

    def own_names(self, recipe: Recipe) -> list[str]:
        return own_names(recipe)
