"""Checks the destination of a conversion: what exists there is replaced only if the user asked for it and if it is
weights."""

import os
import re
from pathlib import Path

from shardwise.errors import CheckpointError, ConfigError
from shardwise.state.formats.folder import SIDECARS, is_of_weights
from shardwise.state.integrity.manifest import MANIFEST, is_manifest
from shardwise.state.staging import check_place

_OF_DCP = re.compile(r"__\d+_\d+\.distcp|\.metadata")


def check_destination(source: Path, dest: Path, *, is_file: bool, overwrite: bool) -> None:
    """Refuses a destination that is not possible, or where something else would be lost.

    Args:
        source: path of the weights to convert.
        dest: path of the result.
        is_file: whether the result is one file; otherwise it is a directory.
        overwrite: whether the user asked to replace what exists there.

    Raises:
        CheckpointError: something exists there that must not be replaced.
        ConfigError: source and destination contain each other, or a file would replace a directory.
    """
    if dest.resolve() == source.resolve():
        raise ConfigError(f"convert {source} {dest}", why="both are the same place", fix="name another destination")
    if os.path.lexists(dest) and not overwrite:
        raise CheckpointError(
            f"converting to {dest}", why="it is there already", fix="name another destination, or add --overwrite"
        )
    if source.is_dir() and dest.resolve().is_relative_to(source.resolve()):
        raise ConfigError(
            f"convert {source} {dest}",
            why="the result would lie within its source",
            fix="choose a path outside it",
        )
    if source.resolve().is_relative_to(dest.resolve()):
        raise ConfigError(
            f"convert {source} {dest}",
            why="the source lies within the destination, which is replaced as a whole",
            fix="choose a separate folder",
        )
    if not is_file:
        check_place(Path(os.path.abspath(dest)))
    if dest.is_dir() and not dest.is_symlink():
        _check_replaceable(dest, is_file)


def _check_replaceable(dest: Path, is_file: bool) -> None:
    """Refuses to replace a directory with files that no conversion wrote, since it would be replaced as a whole."""
    if is_file:
        raise ConfigError(
            f"converting to {dest}", why="it is a directory, and one file is written", fix="name a file in it"
        )
    for entry in sorted(dest.iterdir()):
        of_weights = is_of_weights(entry.name) or _OF_DCP.fullmatch(entry.name) or entry.name in SIDECARS
        if not of_weights and not (entry.name == MANIFEST and is_manifest(entry)):
            raise CheckpointError(
                f"converting to {dest} with --overwrite",
                why=f"{entry.name} in it is no part of weights, and the directory is replaced as a whole",
                fix="move it away, or name another destination",
            )
