"""Keeps what an older run has written at its end where a new run uses its folder: once, next to where its own will be. Torch-free to
import: launchers use it too."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from shardwise.config.folders import KINDS, SIDECARS, check_place
from shardwise.errors import CheckpointError


def place_of_older(folder: Path) -> Path:
    """The folder in which the older files of ``folder`` are kept."""
    return folder.with_name(f"{folder.name}.previous")


def keep_older(folder: Path, kind: str, used: Mapping[str, str | None]) -> Path | None:
    """Keeps the weights or adapters in ``folder`` under another name, and returns that; None: there are none, or it is a link, whose target
    stays when a save replaces it.

    Called when a run starts, not when it saves: it may be stopped in between, and the run that resumes it cannot know whose
    weights lie there. The files have both names until a save replaces the folder, so a model that the run starts from stays where
    it is, and no space is used before. Older ones under that name are replaced, as a save does.

    Args:
        folder: in which the new run will save its own.
        kind: of what it saves.
        used: paths that the run reads, by the key that names them.

    Raises:
        CheckpointError: those that would be replaced are the ones that the run starts from, or something else is there.
        OSError: they cannot be kept; what was there is unchanged.
    """
    from shardwise.state.staging import Staged, link  # imports torch, which ranks need anyway

    if not (files := check_older(folder, kind, used)):
        return None
    place = place_of_older(folder)
    with contextlib.closing(Staged(place)) as staged:
        for entry in files:
            link(entry, staged.path / entry.name)
        staged.commit(kind)
    return place


def check_older(folder: Path, kind: str, used: Mapping[str, str | None]) -> list[Path]:
    """The files that :func:`keep_older` keeps."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    own = KINDS[kind].replaced
    files = [entry for entry in folder.iterdir() if own.fullmatch(entry.name) or entry.name in SIDECARS]
    if not any(own.fullmatch(entry.name) for entry in files):
        return []
    place = place_of_older(folder)
    for key, path in used.items():
        if path is not None and Path(path).resolve().is_relative_to(place.resolve()):
            raise CheckpointError(
                f"{key}={path!r} in a run that writes to {folder}",
                why="the weights of the run before are kept there, once, so it would be replaced by those that are in its place now",
                fix="name another folder: --log.dir=PATH; or move one of the two",
            )
    check_place(place.resolve(), kind, f"the files of the run before, from {folder} to {place}")
    return files
