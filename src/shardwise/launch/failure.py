"""Describes what went wrong on a rank, and finds which of several failures caused the others.

When one rank fails, its peers fail too: their collectives lose a partner. Reports arrive within milliseconds of each
other and in any order, so the first one is not always the cause. :func:`root_cause` sorts them: first a rank that was
killed by a signal or failed by itself, then one that aborted in a collective, last one that lost a peer.
"""

import contextlib
import pickle
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.errors import RankError, ShardwiseError

# Messages of gloo, NCCL and torch's stores when the other end is gone: usually an effect of a failure, not the cause.
_LOST_PEER = (
    "connection closed by peer", "connection reset by peer", "connection refused", "connection was likely closed", "broken pipe",
    "socket closed", "socket timeout", "failed to recv", "failed to send", "timed out waiting", "wait timeout",
    "remote process exited", "gloo/transport",
)  # fmt: skip
# Of this process alone, though the message names gloo or NCCL: a limit of the system.
_OWN_LIMIT = ("too many open files", "cannot allocate memory")

_FIX_EXIT = "look for sys.exit or os._exit in the code of that rank"
_FIX_OWN = "read the traceback of that rank; the other ranks were ended because of it"
_FIX_LOST = "a peer left or did not answer in time: look for a rank that took another path, at its lines and its stack"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    Args:
        rank: the rank that failed.
        what: one line, without the rank ("was killed by signal 9 (SIGKILL)", "raised ValueError: no such file").
        detail: the traceback, or the last lines that the rank wrote; may be empty.
        weight: 0 for a failure of its own, larger the more likely it is that a peer caused it.
        error: the pickled exception, or None where it cannot be pickled or there is none.
        fix: what the user can do.
        reported: the rank reported this itself, while its process was in order.
        hung: the rank did not answer in time.
        shared: not the fault of one rank; all ranks with this failure are named together.
    """

    rank: int
    what: str
    detail: str = ""
    weight: int = 0
    error: bytes | None = field(default=None, repr=False)
    fix: str = _FIX_OWN
    reported: bool = False
    hung: bool = False
    shared: bool = False


def signal_name(number: int) -> str:
    """The name of a signal ("SIGKILL"), or "unknown" for a number this system has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def describe_exit(rank: int, code: int, *, detail: str = "", finished: bool = False) -> Failure:
    """Turns the exit code of a rank that reported no error into a :class:`Failure`.

    Args:
        rank: the rank.
        code: its exit code; below 0 it is a signal.
        detail: the last lines that it wrote.
        finished: it had returned its result, so the failure happened later (exit handlers, the end of threads).
    """
    if code == -signal.SIGABRT:
        return Failure(
            rank=rank,
            what=f"was killed by signal {-code} (SIGABRT): it aborted itself",
            detail=detail,
            weight=1,
            fix="aborted: usually the ranks disagreed about the size or order of a collective; look for code that "
            "runs a collective on some ranks only, or with other shapes",
        )
    if code < 0:
        fix = "find who sent the signal"
        if code == -signal.SIGKILL:
            fix = "usually the system ran out of memory (see `dmesg`): use less memory per rank, or fewer ranks"
        elif code in (-signal.SIGSEGV, -signal.SIGBUS):
            fix = "a native library crashed: run the rank with PYTHONFAULTHANDLER=1 to see the Python line"
        return Failure(rank=rank, what=f"was killed by signal {-code} ({signal_name(-code)})", detail=detail, fix=fix)
    return Failure(
        rank=rank,
        what=f"exited with code {code} {'after its result' if finished else 'without a result'}",
        detail=detail,
        fix=_FIX_EXIT,
    )


def failure_of_server(rank: int, server: int, code: int | None) -> Failure:
    """The failure of a rank that ended only because its fork server ended; ``code``: exit code of the server."""
    how = "has ended"
    if code is not None:
        how = describe_exit(rank, code).what if code < 0 else f"exited with code {code}"
    return Failure(
        rank=rank,
        what=f"ended with process {server}, which the ranks were forked from, and which {how}",
        detail="the system kills the ranks when that process ends; none of them failed",
        fix="find who ended that process; if memory ran out, it was the system (see `dmesg`): use less memory, or fewer ranks",
        shared=True,
    )


def failure_of(rank: int, error: BaseException) -> Failure:
    """Describes an exception raised on ``rank``, with its traceback, so that it can be sent to another process. That of
    ``sys.exit(0)`` is described as an exit.

    The first frame, which is the caller's own ``try``, is left out.
    """
    text = str(error)
    summary = text.strip().splitlines()[0] if text.strip() else ""
    name = type(error).__name__
    weight = _weight(error, text)
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    detail = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if isinstance(error, SystemExit) and not error.code:
        what = "exited with code 0 without a result"
        return Failure(rank=rank, what=what, detail=detail, fix=_FIX_EXIT, reported=True)
    return Failure(
        rank=rank,
        what=f"raised {name}: {summary}" if summary else f"raised {name}",
        detail=detail,
        weight=weight,
        fix=_FIX_LOST if weight else _FIX_OWN,
        error=_dump(error),
        reported=True,
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` is what a collective or a store raises when its other end is gone."""
    text = str(error).lower()
    if not isinstance(error, (ConnectionError, RuntimeError)) or any(sign in text for sign in _OWN_LIMIT):
        return False
    return any(sign in text for sign in _LOST_PEER)


def _weight(error: BaseException, text: str) -> int:
    if isinstance(error, RankError):
        return 2
    lost = is_lost_peer(error)
    return 3 if lost else 0


def _dump(error: BaseException) -> bytes | None:
    # An exception may hold anything (open files, locks); one that cannot be pickled is described by its text instead.
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    return None


def load_error(failure: Failure) -> BaseException | None:
    """The exception itself, or None where it cannot be rebuilt in this process (its class is not importable here)."""
    if failure.error is None:
        return None
    with contextlib.suppress(Exception):
        error = pickle.loads(failure.error)
        return error if isinstance(error, BaseException) else None
    return None


def named_by(failure: Failure) -> set[int]:
    """Other ranks that the failed rank named as the cause."""
    error = load_error(failure)
    return set(error.ranks) - {failure.rank} if isinstance(error, RankError) else set()


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that most likely caused the others: the lowest weight, and among equals the first that arrived."""
    return min(failures, key=lambda failure: failure.weight)


def rank_error(failure: Failure, *, others: Iterable[int] = (), alike: Iterable[int] = ()) -> RankError:
    """The RankError raised in the parent; ``__cause__`` is the rank's own exception where that could be rebuilt.

    Args:
        failure: the root cause.
        others: ranks that failed as well; named, their errors are not shown.
        alike: ranks with the same failure (stopped, late); they are in ``.ranks`` with the rank of ``failure``.
    """
    ranks = tuple(sorted({failure.rank, *alike}))
    why = failure.detail or "its process ended without reporting an error"
    also = ", ".join(str(rank) for rank in sorted(set(others) - set(ranks)))
    if also:
        why += f"\n  (then also failed: rank {also})"
    who = f"rank {', '.join(map(str, ranks))}"
    cause = load_error(failure)
    fix = cause.fix if isinstance(cause, ShardwiseError) else failure.fix
    error = RankError(f"{who} {failure.what}", why=why, fix=fix, ranks=ranks)
    error.__cause__ = cause
    return error
