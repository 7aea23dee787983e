"""A lock file that one process holds: the system lets go of it when that process ends, however it ends."""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

__all__ = ["try_lock"]


def try_lock(path: Path) -> tuple[TextIO | None, str]:
    """Takes the lock, and leaves word of who has it.

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
        return None, owner
    except OSError:
        pass  # a file system without locks: nobody can be kept out
    held.truncate(0)
    held.write(f"{os.getpid()} on {socket.gethostname()}\n")
    held.flush()
    return held, ""
