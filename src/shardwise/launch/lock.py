"""A lock file that one process holds: the system lets go of it when that process ends, however it ends."""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple, TextIO

__all__ = ["LockAttempt", "release", "try_lock"]


class LockAttempt(NamedTuple):
    """What became of an attempt.

    Attributes:
        held: the open file, which holds the lock until it is closed; None: another process has it.
        owner: who that is, as text.
        note: where the file system has no locks, which nobody can be kept out of: that, as text; the file is given to everybody.
    """

    held: TextIO | None
    owner: str = ""
    note: str | None = None


def try_lock(path: Path, *, wait_s: float = 0.0) -> LockAttempt:
    """Takes the lock, and leaves word of who has it.

    Args:
        path: the file, which is made if it is not there.
        wait_s: how long to wait for a process that has it, in seconds: one that was killed has it until the system is done with it.

    Raises:
        OSError: the file cannot be made.
    """
    held, note = path.open("a+", encoding="utf-8"), None
    try:
        _flock(held, wait_s)
    except BlockingIOError:
        held.seek(0)
        owner = held.read().strip() or "unknown"
        held.close()
        return LockAttempt(None, f"{owner}: this one, which has not closed it" if owner == _told() else owner)
    except OSError as error:
        note = f"{path.parent} lies on a file system without locks ({error.strerror or error}): who else writes there is not noticed"
    held.truncate(0)
    held.write(f"{_told()}\n")
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
    """Gives the lock back now. Closing the file would not while a child has it open too, as one that was forked does."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(held, fcntl.LOCK_UN)
    held.close()


def _told() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"
