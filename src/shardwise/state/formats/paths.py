"""Files that a file of names (an index, a DCP directory's metadata) says belong to it."""

from pathlib import Path, PurePosixPath

from shardwise.errors import CheckpointError

__all__ = ["inside"]


def inside(folder: Path, file: str, index: Path) -> Path:
    """The path of a file that ``index`` names; only one in the directory itself will do. The hub's cache keeps its
    files as links to a folder of blobs that lies beside the snapshots, which is allowed.

    Raises:
        CheckpointError: a path or a link out of the directory, or no such file.
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
