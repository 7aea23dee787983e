"""The registry of models that tests shard: a record each, found by name or by tags.

A new model is a record in one of the files of this folder. Importing the registry imports no transformers and no other package: those are
imported by the functions that build.
"""

from models import (
    awkward,
    constructors,
    drops,
    families,
    hugging_face,
    linears,
    other_families,
    other_uses,
    packages,
    recomputed,
    shared_layer,
    stacks,
    tempered,
    tied,
    torch_attention,
    towers,
    tp_families,
    unreplayable,
    vocabularies,
    written,
    zoo,
)
from models.record import Model

__all__ = ["MODELS", "Model", "get", "select"]

MODELS: dict[str, Model] = {}
"""Name -> record."""

_SOURCES = (
    *(zoo, hugging_face, families, other_families, packages, written, constructors, unreplayable, awkward),
    *(
        tied,
        tempered,
        shared_layer,
        stacks,
        towers,
        recomputed,
        drops,
        linears,
        other_uses,
        vocabularies,
        torch_attention,
        tp_families,
    ),
)

for _source in _SOURCES:
    for _model in _source.MODELS:
        if _model.name in MODELS:
            raise ValueError(f"two models of the tests are called {_model.name}")
        MODELS[_model.name] = _model


def get(name: str) -> Model:
    """The model of this name."""
    return MODELS[name]


def select(*tags: str) -> dict[str, Model]:
    """Name -> model, of those with all of these tags."""
    return {name: model for name, model in MODELS.items() if set(tags) <= set(model.tags)}
