"""Finds out from another thread whether the main thread of a rank waits for other ranks, and prints for which."""

import contextlib
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch.distributed as dist

from shardwise.launch.imports import uncollected
from shardwise.world.beats import Beat

_COLLECTIVES = str(Path(dist.__file__).parent)
_NO_COLLECTIVES = tuple(str(Path(_COLLECTIVES) / name) for name in ("checkpoint", "elastic"))  # slow files, launchers
_NOT_THE_USERS = (
    str(Path(dist.__file__).parents[1]),  # torch
    str(Path(__file__).parents[1]),  # this package
    sysconfig.get_paths()["stdlib"],
    "<",  # <string>, <frozen importlib>
)
_BLOCKED_CPU_S = 1e-3  # a thread blocked in a collective uses no CPU time, a loop over quick collectives milliseconds
_AGAIN = 4  # a report is repeated when the wait is this many times as long
_SHOWN = 4  # ranks named in one report


@dataclass(frozen=True)
class Wait:
    """What a main thread waits in, and since when on its watch's clock; and the process group if it is a collective."""

    what: str
    since: float
    group: str = ""


class MainThread:
    """The main thread as seen from another one: its line in the user's code, and whether a collective blocks it."""

    def __init__(self, thread: threading.Thread):
        self._thread = thread
        self._clock: int | None = None
        if thread is threading.main_thread() and thread.ident and hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(thread.ident)
        self._site: tuple[CodeType, int] | None = None
        self._cpu, self._since = 0.0, 0.0

    def line(self) -> str:
        """The innermost line of code that is not torch's, ours or Python's own: "train.py:21 in main"; "" for none."""
        with _without_collecting():
            frame = self._frame()
            while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
                frame = frame.f_back
            if frame is None:
                return ""
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"

    def blocked(self, now: float) -> Wait | None:
        """The collective in which the thread is and uses no CPU time, since the call of this at :attr:`Wait.since`."""
        with _without_collecting():
            frame = self._frame()
            if self._clock is None or frame is None or not _is_collective(frame.f_code.co_filename):
                self._site = None
                return None
            site, cpu = (frame.f_code, frame.f_lasti), time.clock_gettime(self._clock)
            if site != self._site or cpu - self._cpu > _BLOCKED_CPU_S:
                self._site, self._cpu, self._since = site, cpu, now
            group = getattr(frame.f_locals.get("group"), "group_name", "")
            return Wait(f"in {frame.f_code.co_name}", self._since, group)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0) if self._thread.is_alive() else None


_looking = threading.Lock()


def _forget_threads() -> None:
    global _looking
    _looking = threading.Lock()  # a thread that the child does not have may hold the old one


os.register_at_fork(after_in_child=_forget_threads)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Context manager: no garbage is collected while frames of another thread are looked at.

    Python 3.11 may collect when it makes the object that stands for a frame, and what is collected may let the other thread run (a
    process group ends without the interpreter's lock). If that thread leaves the frame, the object points to freed memory, and
    the next look at it is a segmentation fault. From 3.12 on garbage is collected between instructions only.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with _looking, uncollected():  # one thread at a time: the first to end would let the others' garbage be collected
        yield


def _is_collective(path: str) -> bool:
    return path.startswith(_COLLECTIVES) and not path.startswith(_NO_COLLECTIVES)


class WaitReport:
    """Prints on stderr which ranks this rank waits for, or what keeps it: after ``report_s`` seconds, and again when that has
    lasted four times as long."""

    def __init__(self, rank: int, report_s: float, timeout_s: float):
        self._rank, self._report_s, self._timeout_s = rank, report_s, timeout_s
        self._wait: Wait | None = None
        self._next_s = report_s

    def is_due(self, wait: Wait | None, now: float) -> bool:
        """Whether it is time to print a report about ``wait``."""
        if wait is None or wait != self._wait:
            self._wait, self._next_s = wait, self._report_s
        return wait is not None and now - wait.since >= self._next_s

    def say(self, wait: Wait, now: float, whom: str) -> None:
        """Prints the report; ``whom`` it waits for is a text."""
        waited = now - wait.since
        self._next_s = _AGAIN * waited
        text = f"shardwise: rank {self._rank} has waited {waited:.0f} s {wait.what}: {whom}"
        print(f"{text}; it waits until the timeout of {self._timeout_s:.0f} s", file=sys.stderr, flush=True)

    def say_busy(self, busy: Wait, now: float, line: str) -> None:
        """Prints that this rank is busy, ``line`` of the user's code, and has not come further."""
        lasted = now - busy.since
        self._next_s = _AGAIN * lasted
        where = f" ({line})" if line else ""
        text = f"shardwise: rank {self._rank} has been {busy.what} for {lasted:.0f} s{where}, and the step waits for it"
        print(text, file=sys.stderr, flush=True)


def missing(
    what: str,
    beats: Mapping[int, Beat],
    silent: Mapping[int, float],
    *,
    unseen: tuple[int, ...] = (),
    behind: tuple[int, str] = (0, ""),
) -> tuple[tuple[int, ...], str]:
    """The ranks that are not where this one waits, and where they are.

    Args:
        what: what this rank waits in.
        beats: the last beat of each of the others.
        silent: the ranks without a sign of life, and for how many seconds.
        unseen: ranks that have never given one.
        behind: the last exchange that all ranks have passed, and its place: a beat may be older.
    """
    lines = dict.fromkeys(unseen, "has not begun")
    for rank, beat in beats.items():
        if rank in silent:
            where = beat.where if beat.exchanges >= behind[0] else f"after {behind[1]}"
            process = f" (process {beat.process})" if beat.process else ""
            lines[rank] = f"has given no sign of life for {silent[rank]:.0f} s, it was last {where}{process}"
        elif beat.has_left:
            lines[rank] = "has left"
        elif not beat.waits:
            lines[rank] = f"is {beat.where}"
    if not lines:
        lines = {rank: f"waits {beat.waits}, {beat.where}" for rank, beat in beats.items() if beat.waits != what}
    ranks = tuple(sorted(lines))
    shown = "; ".join(f"rank {rank} {lines[rank]}" for rank in ranks[:_SHOWN])
    more = f"; and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return ranks, f"{shown}{more}" or "all the others wait there too"
