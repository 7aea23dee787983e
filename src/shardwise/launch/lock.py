"""A lock file that one process holds; the system releases it when that process ends, however it ends."""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple, TextIO


class LockAttempt(NamedTuple):
    """The result of :func:`try_lock`.

    Attributes:
        held: the open file, which holds the lock until it is closed; None: another process has it.
        owner: the process that has it, as text.
        note: as text, that the file system has no locks, so that no other process can be kept out; every process gets
            the file then.
    """

    held: TextIO | None
    owner: str = ""
    note: str | None = None


def try_lock(path: Path, *, wait_s: float = 0.0) -> LockAttempt:
    """Takes the lock and writes this process's id and host into the file.

    Args:
        path: the file, which is created if it does not exist.
        wait_s: how long to wait, in seconds, for a process that has it: a killed process has it until the system has
            cleaned up.
    """
    held, note = path.open("a+", encoding="utf-8"), None
    try:
        _flock(held, wait_s)
    except BlockingIOError:
        held.seek(0)
        owner = held.read().strip() or "unknown"
        held.close()
        return LockAttempt(None, f"{owner}: this one, which has not closed it" if owner == _this_process() else owner)
    except OSError as error:
        note = f"{path.parent} lies on a file system without locks ({error.strerror or error}): who else writes there is not noticed"
    held.truncate(0)
    held.write(f"{_this_process()}\n")
    held.flush()
    return LockAttempt(held, note=note)


def _flock(held: TextIO, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.05)


def release(held: TextIO) -> None:
    """Releases the lock now. Closing alone would not if a child has the file open too, as a forked one does."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(held, fcntl.LOCK_UN)
    held.close()


def _this_process() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"
