"""Checks what readers of all formats share: a path that a file names, a shape, names that may be there once; and the error of a
damaged file."""

from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.errors import CheckpointError


def damaged(place: Path | str, given: str, why: str, name: str | None = None) -> CheckpointError:
    """The error for a file that is not what its format says."""
    return CheckpointError(
        f"{place}: {given}", why=why, fix="copy it again, or save it again: it is damaged", name=name
    )


def is_count(value: Any) -> bool:
    """Whether a value is a number of bytes or elements."""
    return type(value) is int and 0 <= value < 1 << 63


def counts_in(value: Any) -> tuple[int, ...] | None:
    """A shape, or other counts that a list has; None: it is no such list, or longer than any shape."""
    is_list = isinstance(value, tuple | list) and len(value) <= 64 and all(map(is_count, value))
    return tuple(value) if is_list else None


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: refuses a name that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def inside(folder: Path, file: str, index: Path) -> Path:
    """The path of a file that ``index`` names, which must be in the directory itself. Links of the Hugging Face cache,
    to a folder of blobs next to the snapshots, are allowed."""
    name = PurePosixPath(file)
    if name.is_absolute() or ".." in name.parts or "\\" in file or not name.parts or "\0" in file:
        raise CheckpointError(
            f"the file {index} names {file!r}",
            why="that leaves the directory of the model",
            fix="do not trust this directory: an index names files that lie beside it",
        )
    path = folder / name
    home, real = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not real.is_relative_to(home) and not (blobs is not None and real.is_relative_to(blobs)):
        raise CheckpointError(
            f"{path}",
            why=f"it is a link out of the directory, to {real}",
            fix="copy the file itself there, if you trust it",
        )
    if not real.is_file():
        raise CheckpointError(
            f"{path}", why="there is no such file", fix="copy the missing file, or the directory, again"
        )
    return path
