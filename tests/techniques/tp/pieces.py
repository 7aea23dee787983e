"""Which part of each matrix a rank has."""

from typing import Any

import models

import shardwise as sw

MATRICES = (
    "transformer.wte",
    *(f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
)


def pieces_of_gpt2(layout: str) -> dict[str, dict[str, list]]:
    """Name of a matrix in the first block of GPT-2, or the embedding -> its shape, and for each rank the first row, first column,
    rows and columns of its pieces."""
    return _pieces(layout, "gpt2", {name: f"{name}.weight" for name in MATRICES})


def pieces_of_adapters(layout: str) -> dict[str, dict[str, list]]:
    """The same of the tensors of two layers of a Llama with an adapter of DoRA."""
    names = {}
    for layer in ("mlp.gate_proj", "mlp.down_proj"):
        parts = {"W": "weight", "A": "lora_A.default.weight", "B": "lora_B.default.weight"}
        parts["m"] = "lora_magnitude_vector.default.weight"
        names |= {f"{layer} {part}": f"model.layers.0.{layer}.{end}" for part, end in parts.items()}
    return _pieces(layout, "llama", names, lora=sw.LoRA(rank=4, dora=True))


def _pieces(layout: str, model: str, names: dict[str, str], **options: Any) -> dict[str, dict[str, list]]:
    with sw.init(layout, device="cpu") as world:
        recipe = sw.recipe_of(sw.parallelize(models.get(model).build, world, **options))
        found = {}
        for label, name in names.items():
            held = [recipe.at(rank).extents(name) for rank in range(world.size)]
            found[label] = {
                "shape": list(recipe.params[name].shape),
                "pieces": [[[*piece.starts, *piece.sizes] for piece in of_rank] for of_rank in held],
            }
    return found
