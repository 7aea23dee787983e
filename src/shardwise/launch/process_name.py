"""The name of a rank's process in ``ps -o comm`` and ``top``: ``sw:3/8 train``. Only on Linux."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_COMM = Path("/proc/self/comm")  # of the main thread: other threads keep theirs, those started later get it
_LONGEST = 15  # bytes; the kernel cuts what is longer


def name_of_rank(rank: int, size: int, what: str) -> str:
    """``sw:RANK/SIZE WHAT``, without what is too long."""
    name = f"sw:{rank}/{size}"
    return f"{name} {what}" if len(name) + 1 + len(what) <= _LONGEST else name[:_LONGEST]


@contextlib.contextmanager
def process_named(name: str) -> Iterator[None]:
    """Context manager: this process has that name; elsewhere than on Linux nothing happens."""
    before = _replace(name)
    try:
        yield
    finally:
        if before is not None:
            _replace(before)


def _replace(name: str) -> str | None:
    """Sets the name; returns the one before, or None if there is no such thing here."""
    try:
        before = _COMM.read_text(errors="replace").rstrip("\n")
        _COMM.write_text(name)
    except OSError:  # no Linux, or a /proc that is not to be written
        return None
    return before
