"""The name of a rank's process in ``ps -o comm`` and ``top``: ``sw:3/8 train``. Only on Linux."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["name_of_rank", "process_named", "rank_and_size"]

_COMM = Path("/proc/self/comm")  # of the main thread: other threads keep theirs, those started later get it
_LONGEST = 15  # bytes; the kernel cuts what is longer


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun, SLURM or ``launch_local`` set them; 0 of 1 without."""
    given = os.environ
    rank = given.get("RANK") or given.get("SLURM_PROCID") or 0
    return int(rank), int(given.get("WORLD_SIZE") or given.get("SLURM_STEP_NUM_TASKS") or 1)


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
