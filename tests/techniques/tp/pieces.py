"""Which part of each matrix a rank has."""

import models

import shardwise as sw

MATRICES = (
    "transformer.wte",
    *(f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
)


def pieces_of_gpt2(layout: str) -> dict[str, dict[str, list]]:
    """Name of a matrix in the first block of GPT-2, or the embedding -> its shape, and for each rank the first row, first column,
    rows and columns of its pieces."""
    with sw.init(layout, device="cpu") as world:
        recipe = sw.recipe_of(sw.parallelize(models.get("gpt2").build, world))
        found = {}
        for module in MATRICES:
            name = f"{module}.weight"
            held = [recipe.at(rank).extents(name) for rank in range(world.size)]
            found[module] = {
                "shape": list(recipe.params[name].shape),
                "pieces": [[[*piece.starts, *piece.sizes] for piece in of_rank] for of_rank in held],
            }
    return found
