"""What a directory holds, and the one rule for what is written into it, for functions and the command line. Torch-free.

A save replaces the files of its own kind, and keeps all others. It is refused where another kind lies, whose files it would delete,
or which would be read together with its own; and within a checkpoint, which has exactly the files that its manifest names.
"""

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from shardwise.config.tokenizer import TOKENIZER_FILES
from shardwise.errors import CheckpointError

SPARE = 64 << 20  # bytes
MANIFEST = "manifest.json"
FORMAT = "shardwise checkpoint"
_STATE = Path("training", "state.json")  # of a run's checkpoint
_STEP = re.compile(r"step-(\d{8,})")
_PARTS = r"(-\d{5}-of-\d{5})?"


class Kind(NamedTuple):
    """A kind of directory: what it is called, the names of the files that a save of it replaces, and of those that show it."""

    words: str
    replaced: re.Pattern[str]
    shown: re.Pattern[str] | None  # of a checkpoint: see is_checkpoint


_WEIGHTS = rf"model{_PARTS}\.safetensors|model\.safetensors\.index\.json"
_ADAPTERS, _DCP = r"adapter_(model\.safetensors|config\.json)", r"__\d+_\d+\.distcp|\.metadata"
KINDS = {
    "weights": Kind("the weights of a model", re.compile(_WEIGHTS), re.compile(rf"{_WEIGHTS}|pytorch_model{_PARTS}\.bin")),
    "adapter": Kind("adapters", re.compile(_ADAPTERS), re.compile(rf"{_ADAPTERS}|adapter_model\.bin")),
    "dcp": Kind("a checkpoint of torch.distributed.checkpoint", re.compile(_DCP), re.compile(_DCP)),
    "checkpoint": Kind("a checkpoint", re.compile(rf"{_WEIGHTS}|manifest\.json"), None),
}  # fmt: skip

SIDECARS = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    *TOKENIZER_FILES,
)  # fmt: skip


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint directory's name; None: it is not the name of a checkpoint."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_checkpoint(folder: Path, *, by_name: bool = False) -> bool:
    """Whether a directory was written as a checkpoint, even if it is damaged; ``by_name``: or is called like one."""
    file, head, is_named = folder / MANIFEST, b"", step_of(folder) is not None
    if (folder / _STATE).exists() or (is_named and (by_name or file.exists())):
        return True
    with contextlib.suppress(OSError):
        if file.is_file():
            with file.open("rb") as opened:
                head = opened.read(4096)
    return any(mark in head for mark in (b'"block_bytes"', b'"crc32c"', FORMAT.encode()))  # others use its name too


def found_in(folder: Path) -> dict[str, str]:
    """The kinds of what a directory holds, each with a file that shows it."""
    if is_checkpoint(folder):
        return {"checkpoint": MANIFEST}
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    shown = ((kind, next(filter(each.shown.fullmatch, names), None)) for kind, each in KINDS.items() if each.shown)
    return {kind: name for kind, name in shown if name is not None}


def check_place(dest: Path, kind: str, given: str = "", option: str = "") -> None:
    """Refuses a destination to which no directory can be moved, or where something else would be lost or read in its place.

    Args:
        dest: its path, without links.
        kind: of :data:`KINDS`, which is written there.
        given: for the error; empty: what is written, and where.
        option: of the command line that names the directory, with its "=".
    """
    given = given or f"{'adapters' if kind == 'adapter' else kind} to {dest}"
    standing = next(place for place in (dest, *dest.parents) if place.exists())
    if not standing.is_dir():
        raise CheckpointError(
            given,
            why=f"{standing} is a file, and a folder is needed",
            fix=f"name another folder: {option}{_beside(standing, kind)}",
        )
    fix = f"name a folder inside it: {option}{dest / kind}"
    if dest.is_dir() and Path.cwd().is_relative_to(dest):
        raise CheckpointError(given, why="it holds the working directory, and is replaced as a whole", fix=fix)
    if os.path.ismount(dest):
        raise CheckpointError(given, why="it is a mount point, and is replaced as a whole", fix=fix)
    for place in (dest.parent, dest):  # a new one is made in the parent, and takes its name
        check_writable(place, given, option)
    refuse_other_kind(dest, kind, given, option)


def check_writable(place: Path, given: str, option: str = "") -> None:
    """Refuses a folder in which nothing can be written; of one that is not there, that in which it would be made."""
    standing = next(folder for folder in (place, *place.parents) if folder.exists())
    if not os.access(standing, os.W_OK | os.X_OK):
        code = errno.EROFS if os.statvfs(standing).f_flag & os.ST_RDONLY else errno.EACCES
        fix = f"name another folder{f': {option}PATH' if option else ''}"
        raise CheckpointError(given, why=f"it cannot be written: {os.strerror(code)}: {standing}", fix=fix)


def refuse_other_kind(dest: Path, kind: str, given: str, option: str = "") -> None:
    """Refuses to write files of one kind into a directory of another, or within a checkpoint."""
    refuse_within_checkpoint(dest.parent, kind, given, option)
    other, name = next((found for found in found_in(dest).items() if found[0] != kind), (None, ""))
    if other is not None:
        raise CheckpointError(
            given,
            why=f"{dest} holds {KINDS[other].words} ({name}), which would be lost, or be read together with what is written",
            fix=f"name another folder: {option}{_beside(dest, kind)}",
        )


def refuse_within_checkpoint(folder: Path, kind: str, given: str, option: str = "") -> None:
    """Refuses to write into a checkpoint, or a folder in one: it is damaged by a file that its manifest does not name."""
    home = next((place for place in (folder, *folder.parents) if is_checkpoint(place)), None)
    if home is not None:
        raise CheckpointError(
            given,
            why=f"{home} is a checkpoint, which could not be read any more with a file that its manifest does not name",
            fix=f"name another folder: {option}{_beside(home, kind)}",
        )


def spare_bytes(disk_bytes: int) -> int:
    """The bytes that a checkpoint leaves free for other programs; few on a small disk, which still holds small ones."""
    return min(SPARE, disk_bytes // 50)


def free_place(dest: Path, kind: str) -> Path:
    """A directory for files of a kind: ``dest``, or one next to it where something else is there."""
    is_free = (dest.is_dir() or not os.path.lexists(dest)) and not {*found_in(dest)} - {kind}
    return dest if is_free else _beside(dest, kind)


def _beside(place: Path, kind: str) -> Path:
    """A name next to ``place`` that nothing has."""
    found = place.with_name(f"{place.name}-{kind}")
    return found if not os.path.lexists(found) else _beside(found, kind)
