"""Adds to the recipe what the bytes of packed weights stand for."""

import math
from collections.abc import Mapping
from typing import Any

from shardwise.recipe import Draft, Recipe
from shardwise.techniques.quantize.options import Quantize


def rule(draft: Draft, _facts: Mapping[str, Any], *, quantize: Quantize | None) -> None:
    """Notes the codecs of the draft's module, which ``prepare`` has put there."""
    draft.codecs |= draft.anatomy.codecs
    if quantize is None:
        return
    packed = {codec.of for codec in draft.anatomy.codecs.values()}
    plain = [
        name
        for name, fact in draft.anatomy.params.items()
        if len(fact.shape) == 2 and not fact.trainable and fact.dtype != "uint8" and name not in packed
    ]
    for name in plain:
        draft.note(
            name, "stays plain: it is no frozen weight of a linear layer alone, or was left out", option="quantize"
        )


def lines(recipe: Recipe) -> list[str]:
    """The line about packed weights at the head of ``describe``."""
    codecs = [
        param.codec for param in recipe.params.values() if param.codec is not None and param.codec.part == "codes"
    ]
    if not codecs:
        return []
    numbers = sum(math.prod(codec.shape) for codec in codecs)
    held = sum(math.prod(param.shape) for param in recipe.params.values() if param.codec is not None)
    return [f"nf4: {len(codecs)} frozen weights of {numbers:,} numbers are stored in {held:,} bytes"]
