"""A file that is there only once it is complete. What a process that was killed leaves of one is found and removed by others.

A process holds a lock of the system on the part that it writes, which it loses however it ends: a part of this host without a lock
is left over, whatever process has its number by now. Locks of some network file systems hold on one node only, and some have none:
a part of another host is left over when it has not grown for an hour. A note beside a file says, to those that wait for the lock of
its writer, what that found.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.config.tokenizer import read_json
from shardwise.data.file_digest import state_of

_LEFT_S = 3600.0
_BUFFER = 1 << 20
_LOCKED = ".tokens-"  # how parts begin that are written by :func:`written`; others are small and have no lock


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, which takes the place of ``path`` at the end, unless something is raised; it is removed then."""
    name = f".{path.name}.{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.part"
    part = path.with_name(name)
    try:
        with _locked(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a machine that loses power may keep the name and lose the content
            os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _locked(part: Path) -> BinaryIO:
    while True:
        file = part.open("wb", buffering=_BUFFER)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits only for a remove_left that has just seen the file without a lock
        except OSError:  # no locks
            return file
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def remove_left(folder: Path) -> None:
    """Removes parts of files that no process writes any more."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):  # of another user, or removed by another process
            _remove_if_left(part)


def _remove_if_left(part: Path) -> None:
    with part.open("rb+") as file:  # for writing: NFS wants it so for a lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_left = part.name.startswith(_LOCKED) and _host(part) == socket.gethostname()
        except BlockingIOError:
            return
        except OSError:
            is_left = False
        if is_left or time.time() - os.fstat(file.fileno()).st_mtime > _LEFT_S:
            part.unlink()


def _host(part: Path) -> str:
    return part.name[1:].partition(".")[2].removesuffix(".part").rsplit("-", 2)[0]


def size_of_parts(path: Path) -> int:
    """Bytes that have been written of files that will take the place of ``path``."""
    size = 0
    for part in path.parent.glob(f".{path.name}.*.part"):
        with contextlib.suppress(OSError):
            size += part.stat().st_size
    return size


# ---- notes beside a file ---------------------------------------------------------------------------------------------


def state_of_entry(path: Path) -> list[int]:
    """What the file system says of an entry, the same on every node; empty: it is not there."""
    try:
        return state_of(path)[1:]  # without the number of the device, which each node has for itself
    except OSError:
        return []


def note_of(path: Path) -> dict[str, Any]:
    """What the last process that had the lock of an entry has left; empty: there is no note, or a part of one."""
    return read_json(path.with_name(f".{path.name}.note"))


def news_of(path: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """The note beside an entry, if it has changed."""
    note = note_of(path)
    return note if note != before else {}


def leave_note(path: Path, **facts: Any) -> None:
    """Tells those that wait.

    Args:
        path: of the entry.
        facts: ``checked``, the state of the entry that is as it was written; ``damage``, what was damaged, and ``failure``, why there
            is no entry, as text.
    """
    note = {"by": f"{os.getpid()} on {socket.gethostname()}", "at": time.time_ns(), **facts}
    with contextlib.suppress(OSError):  # then those that wait find out for themselves
        path.with_name(f".{path.name}.note").write_text(json.dumps(note), encoding="utf-8")
