"""A lock file that one process holds: the system lets go of it when that process ends, however it ends."""

import contextlib
import fcntl
import os
import socket
import warnings
from pathlib import Path
from typing import TextIO

__all__ = ["let_go", "try_lock"]


def try_lock(path: Path) -> tuple[TextIO | None, str]:
    """Takes the lock, and leaves word of who has it. Warns where the file system has no locks: then everybody gets it.

    Returns:
        the open file, which holds the lock until it is closed, and ""; or None, and who holds it, as text.

    Raises:
        OSError: the file cannot be made.
    """
    held = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.seek(0)
        owner = held.read().strip() or "unknown"
        held.close()
        return None, f"{owner}: this one, which has not closed it" if owner == _told() else owner
    except OSError as error:  # a file system without locks: nobody can be kept out
        warnings.warn(
            f"{path.parent} lies on a file system without locks ({error.strerror}): a second run there would not be noticed, and "
            "what a killed save leaves behind has to be removed by hand",
            stacklevel=2,
        )
    held.truncate(0)
    held.write(f"{_told()}\n")
    held.flush()
    return held, ""


def let_go(held: TextIO) -> None:
    """Gives the lock back now. Closing the file would not while a child has it open too, as one that was forked does."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(held, fcntl.LOCK_UN)
    held.close()


def _told() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"
