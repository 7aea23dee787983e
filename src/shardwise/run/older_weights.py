"""Keeps the final weights of an older run whose folder a new run uses: once, next to where its own will be. Torch-free to import:
launchers use it too."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import CheckpointError


def place_of_older(weights: Path) -> Path:
    """The folder in which the older ones of ``weights`` are kept."""
    return weights.with_name(f"{weights.name}.previous")


def keep_older_weights(weights: Path, used: Mapping[str, str | None]) -> Path | None:
    """Keeps the model in the folder ``weights`` under another name, and returns that; None: there is none, or a link, whose target
    stays when a save replaces it.

    Called when a run starts, not when it saves: it may be stopped in between, and the run that resumes it cannot know whose
    weights lie there. The files have both names until a save replaces the folder, so a model that the run starts from stays where
    it is, and no space is used before. Older ones under that name are removed.

    Args:
        weights: the folder in which the new run will save its own.
        used: paths that the run reads, by the key that names them.

    Raises:
        CheckpointError: those that would be removed are the ones that the run starts from.
        OSError: they cannot be kept; what was there is unchanged.
    """
    from shardwise.state.formats.folder import SIDECARS, is_of_weights  # imports torch, which ranks need anyway

    if weights.is_symlink() or not weights.is_dir():
        return None
    files = [entry for entry in weights.iterdir() if is_of_weights(entry.name) or entry.name in SIDECARS]
    if not any(is_of_weights(entry.name) for entry in files):
        return None
    place = place_of_older(weights)
    for key, path in used.items():
        if path is not None and Path(path).resolve().is_relative_to(place.resolve()):
            raise CheckpointError(
                f"{key}={path!r} in a run that writes to {weights}",
                why="the weights of the run before are kept there, once, so it would be replaced by those that are in its place now",
                fix="name another folder: --log.dir=PATH; or move one of the two",
            )
    new = place.with_name(f".{place.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        for entry in files:
            _link(entry, new / entry.name)
        if place.exists():
            shutil.rmtree(place)
        new.rename(place)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return place


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)
