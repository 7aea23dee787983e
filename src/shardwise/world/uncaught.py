"""How an uncaught ShardwiseError is shown: by the first rank that has it, with only the script's own lines.

Most errors are raised on every rank. Each would print the same text below a traceback through Shardwise's files: 300
lines with 8 ranks. ``SHARDWISE_TRACEBACK=1`` shows all of it.
"""

import os
import sys
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.world.beats import within
from shardwise.world.env import Env

if TYPE_CHECKING:
    from shardwise.world.liveness import Watch

_WAIT_S = 2.0  # for the store; if it does not answer, every rank shows its own error
_NOT_THE_SCRIPTS = ("shardwise", "torch")
_is_installed = _has_world = False


def show_before_world(env: Env) -> None:
    """Shows an uncaught error as :func:`show` does from here on, until a world is open: of a layout, for example, that does not fit
    the ranks. Which rank is first is asked of torchrun's store, which is there before a group; without one, each shows its own."""
    global _is_installed
    if _is_installed:
        return
    _is_installed, shown = True, sys.excepthook

    def tell(kind: Any, error: BaseException, trace: Any) -> None:
        if _has_world:
            shown(kind, error, trace)
            return
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.source == "torchrun":
            _note_first(env.rank, lambda: _launchers_store(env), error)
        show(shown, error, trace, env.rank)

    sys.excepthook = tell


def leave_to_world() -> None:
    """Called when a world shows uncaught errors."""
    global _has_world
    _has_world = True


def _launchers_store(env: Env) -> dist.Store:
    store = dist.TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timedelta(seconds=_WAIT_S))
    return dist.PrefixStore(f"shardwise/start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def note_first_rank(watch: "Watch | None", error: BaseException | None) -> None:
    """Sets ``shown_by`` of a ShardwiseError if another rank was the first to end with the same kind and first line."""
    if watch is not None:
        _note_first(watch.rank, watch.open_store, error)


def _note_first(rank: int, open_store: Callable[[], dist.Store], error: BaseException | None) -> None:
    if not isinstance(error, ShardwiseError) or error.shown_by is not None or _is_all_wanted():
        return
    key = sha256(f"{type(error).__name__}: {error.name}: {error.given}".encode()).hexdigest()[:16]
    first = within(_WAIT_S, lambda: open_store().compare_set(f"shown/{key}", "", str(rank)))
    error.shown_by = None if first is None or int(first) == rank else f"rank {int(first)}"


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
