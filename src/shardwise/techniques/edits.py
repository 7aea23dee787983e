"""What changes the code of modules, by the recipe's edits, and in which order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.recipe import Edit, Recipe
from shardwise.techniques.compile.act import apply_compile, check_compile
from shardwise.techniques.compile.write_check import watch_cast_inputs, watch_compiled
from shardwise.techniques.precision.act import apply_precision, cast_root
from shardwise.techniques.remat.act import apply_remat, check_remat, explain_remat
from shardwise.world import World

__all__ = ["EXPLAINERS", "check_edits", "edit_after_engine", "edit_before_engine"]


@dataclass(frozen=True)
class _Technique:
    """The functions of one technique; its edits are those with its name."""

    name: str
    apply: Callable[[nn.Module, Sequence[Edit], World], None]
    check: Callable[[nn.Module, Sequence[Edit], World], None] = lambda *_: None
    explain: Callable[[BaseException], ShardwiseError | None] = lambda _: None


# In this order. The hooks of DDP or FSDP2 come in between: around what is changed before, inside what comes after.
_BEFORE_ENGINE = (
    _Technique("remat", apply_remat, check_remat, explain_remat),
    _Technique("compile", apply_compile, check_compile),
)
_AFTER_ENGINE = (_Technique("precision", apply_precision),)

EXPLAINERS = [technique.explain for technique in (*_BEFORE_ENGINE, *_AFTER_ENGINE)]
"""What knows errors of torch's own in our words."""


def check_edits(module: nn.Module, recipe: Recipe, world: World) -> None:
    """Raises what cannot be carried out, by name, before anything is changed."""
    for technique in (*_BEFORE_ENGINE, *_AFTER_ENGINE):
        technique.check(module, _edits(recipe, technique.name), world)


def edit_before_engine(module: nn.Module, recipe: Recipe, world: World) -> None:
    """Changes the code inside of what shards it, in place."""
    for technique in _BEFORE_ENGINE:
        technique.apply(module, _edits(recipe, technique.name), world)
    watch_compiled(module, _edits(recipe, "remat"), _edits(recipe, "compile"))


def edit_after_engine(module: nn.Module, recipe: Recipe, world: World) -> None:
    """Changes the code around what shards it, in place."""
    cast_root(module, recipe)
    for technique in _AFTER_ENGINE:
        technique.apply(module, _edits(recipe, technique.name), world)
    watch_cast_inputs(module, _edits(recipe, "precision"), _edits(recipe, "compile"))


def _edits(recipe: Recipe, technique: str) -> list[Edit]:
    return [edit for edit in recipe.edits if edit.technique == technique]
