"""Checks paths of files that an index or DCP metadata names: they must be inside its directory."""

from pathlib import Path, PurePosixPath

from shardwise.errors import CheckpointError


def inside(folder: Path, file: str, index: Path) -> Path:
    """The path of a file that ``index`` names, which must be in the directory itself. Links of the Hugging Face cache,
    to a folder of blobs next to the snapshots, are allowed.

    Raises:
        CheckpointError: the path or a link leads out of the directory, or the file does not exist.
    """
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
