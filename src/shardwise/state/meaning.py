"""What the values of parameters that techniques have added mean beside their shapes: a checkpoint says it, and is not loaded into a model
where they mean something else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.recipe import Recipe
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.stored import Source
from shardwise.techniques import fold

_STATE = "training/state.json"


def refuse_other_meaning(recipe: Recipe, meaning: Mapping[str, Any], place: Path) -> None:
    """Raises CheckpointError for values that meant something else where they were saved.

    Args:
        meaning: as the checkpoint says it; {}: it is of an earlier version.
    """
    mine = fold.meaning(recipe)
    for key, value in meaning.items():
        if key in mine and mine[key] != value:
            there, here = _apart(value, mine[key])
            raise CheckpointError(
                f"the checkpoint {place}: {key} {there}",
                why=f"the model was made with {here}: the same numbers would give other answers",
                fix="make the model with the options that the checkpoint was saved with: parallelize(..., lora=sw.LoRA(...))",
            )


def _apart(there: Any, here: Any) -> tuple[str, str]:
    """Two values in words; of those that each layer has its own of, the first that differ."""
    each, other = (value if isinstance(value, Mapping) else {} for value in (there, here))
    name = next((name for name in {**each, **other} if each.get(name, there) != other.get(name, here)), None)
    if name is None:
        return f"{there:g}", f"{here:g}"
    said = (of.get(name, "none") if of else value for of, value in ((each, there), (other, here)))
    return tuple(f"{value:g} ({name})" if isinstance(value, float) else str(value) for value in said)  # type: ignore[return-value]


def meaning_in(source: Source, files: VerifiedFiles) -> Mapping[str, Any]:
    """What a checkpoint says of the model whose weights a source is; {}: it is of no run, or of an earlier version."""
    verified, folder = source.verified, source.folder
    if verified is None or folder is None or _STATE not in verified.manifest.files:
        return {}
    inside = folder.relative_to(verified.folder).as_posix() if folder != verified.folder else ""
    try:
        said = json.loads(files.whole(verified.folder / _STATE)).get("meaning") or {}
        return dict(said.get(inside and f"{inside}/", {}))
    except (AttributeError, TypeError, ValueError):  # a state that was not written so is refused where it is restored
        return {}
