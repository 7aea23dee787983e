"""A note beside an entry of the token cache, by which the process that has its lock tells those that wait for it what it found."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.data.file_digest import state_of


def state_of_entry(path: Path) -> list[int]:
    """What the file system says of an entry, the same on every node; empty: it is not there."""
    try:
        return state_of(path)[1:]  # without the number of the device, which each node has for itself
    except OSError:
        return []


def note_of(path: Path) -> dict[str, Any]:
    """What the last process that had the lock of an entry has left; empty: there is no note, or a part of one."""
    try:
        found = json.loads(path.with_name(f".{path.name}.note").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
