"""How an uncaught ShardwiseError is shown: by the first rank that has it, with only the script's own lines.

Most errors are raised on every rank. Each would print the same text below a traceback through Shardwise's files: 300
lines with 8 ranks. ``SHARDWISE_TRACEBACK=1`` shows all of it.
"""

import os
import sys
import traceback
import types
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from shardwise.errors import ShardwiseError
from shardwise.world.beats import within

if TYPE_CHECKING:
    from shardwise.world.watch import Watch

__all__ = ["note_first_rank", "show"]

_WAIT_S = 2.0  # for the store; if it does not answer, every rank shows its own error
_NOT_THE_SCRIPTS = ("shardwise", "torch")


def note_first_rank(watch: "Watch | None", error: BaseException | None) -> None:
    """Sets ``shown_by`` of a ShardwiseError if another rank was the first to end with the same kind and first line."""
    if watch is None or not isinstance(error, ShardwiseError) or error.shown_by is not None or _is_all_wanted():
        return
    key = sha256(f"{type(error).__name__}: {error.name}: {error.given}".encode()).hexdigest()[:16]
    first = within(_WAIT_S, lambda: watch.open_store().compare_set(f"shown/{key}", "", str(watch.rank)))
    error.shown_by = None if first is None or int(first) == watch.rank else f"rank {int(first)}"


def show(shown: Any, error: BaseException, trace: types.TracebackType | None, rank: int) -> None:
    """Shows an uncaught error.

    Args:
        shown: the ``sys.excepthook`` so far, which puts the rank in front of each line.
        error: the error.
        trace: its traceback.
        rank: this rank.
    """
    if not isinstance(error, ShardwiseError) or _is_all_wanted():
        shown(type(error), error, trace)
    elif error.shown_by is not None:
        print(f"[rank{rank}]: {error.in_a_line()}", file=sys.stderr)
    else:
        trace = _of_the_script(trace)
        shown(type(error), error.with_traceback(trace), trace)


def _is_all_wanted() -> bool:
    return os.environ.get("SHARDWISE_TRACEBACK") == "1"


def _of_the_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without frames of Shardwise and torch; the whole one if nothing would be left."""
    kept = None
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_SCRIPTS:
            kept = types.TracebackType(kept, frame, frame.f_lasti, line)
    return kept or trace
