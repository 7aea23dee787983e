"""What a file contains, as a digest of all of it; remembered for as long as the file cannot have changed.

A directory of a saved dataset (:mod:`shardwise.data.sft.saved`) is the files of its rows, in their order, and which columns it shows.
"""

import contextlib
import hashlib
import json
import os
import socket
import time
import zlib
from pathlib import Path

from shardwise.config.tokenizer import read_json
from shardwise.data.sft.saved import open_rows

_SETTLED_S = 2.0  # a change within the same tick of the clock leaves the times of a file as they are


def size_of(path: Path) -> int:
    """Bytes of a file, or of the rows of a saved dataset."""
    return open_rows(path).size if path.is_dir() else path.stat().st_size


def state_of(path: Path) -> list[int]:
    """What the file system says of a file: as long as it stays, so does the content. The time of the last change (ctime) is set
    by the kernel, and no program can put it back, as it can the time of modification."""
    if path.is_dir():
        rows = open_rows(path)
        return [number for file in rows.files for number in state_of(file)] + [zlib.crc32(repr(rows.shown).encode())]
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def digest_of_file(path: Path, folder: Path) -> str:
    """The SHA-256 of a file, or of those of a saved dataset. It is remembered in ``folder``, if that can be written, with :func:`state_of` the file.

    Raises:
        OSError: the file cannot be read.
    """
    if path.is_dir():
        rows = open_rows(path)
        return _sha256(json.dumps([[digest_of_file(file, folder) for file in rows.files], rows.shown]).encode())
    state = state_of(path)
    note = folder / f"file-{_sha256(json.dumps(state).encode())[:32]}.json"
    known = _read(note, state)
    if known is not None:
        return known
    began = time.time()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if began - state[-1] / 1e9 > _SETTLED_S and state_of(path) == state:
        _write(note, {"state": state, "sha256": found, "check": _sha256(f"{state} {found}".encode())})
    return found


def _read(note: Path, state: list[int]) -> str | None:
    known = read_json(note)
    digest = known.get("sha256")
    is_sound = known.get("state") == state and known.get("check") == _sha256(f"{state} {digest}".encode())
    return digest if is_sound else None


def _write(note: Path, found: dict[str, object]) -> None:
    new = note.with_name(f".{note.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        new.write_text(json.dumps(found), encoding="utf-8")
        os.replace(new, note)
    except OSError:  # then it is read again the next time
        with contextlib.suppress(OSError):
            new.unlink()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
