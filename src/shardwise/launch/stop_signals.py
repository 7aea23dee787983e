"""Signals that ask a run to stop: which they are, who may handle them, and what the process that started the ranks does.

Every handler of one is set here or in terms of what is here (:func:`handling`, :func:`may_be_replaced`), so one rule holds for all: a
handler of the application's own is left alone, and off the main thread, where Python allows no handlers, nothing is set.

* The launcher: :class:`FirstStop` passes one request on to its ranks, :class:`Forwarded` each signal that comes, :func:`terminable` ends
  in order what it runs.
* A rank: ``world/signals.py`` makes a request of a signal, which all ranks agree on; ``world/termination.py`` names a lost peer
  before SIGTERM ends the process.
"""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

__all__ = [
    "BLOCKED_AT_START",
    "STOP_SIGNALS",
    "FirstStop",
    "Forwarded",
    "RepeatedSigterm",
    "blocked_at_start",
    "handling",
    "leave",
    "may_be_replaced",
    "only_ends_process",
    "silence_closed_terminal",
    "terminable",
]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers send some time before they end a job, and a terminal (or ssh) that is closed."""

BLOCKED_AT_START = "SHARDWISE_SIGNALS_BLOCKED_AT_START"
"""The variable with the numbers of the signals that a rank starts with blocked: what comes before it is ready is kept for it."""

_ENDING = (signal.SIGTERM, signal.SIGHUP)

_REPEATED_S = 2.0  # `timeout` and some schedulers signal a process and its group: one request that comes twice

Handler = Callable[[int, FrameType | None], Any]

_that_only_end: list[Handler] = []


# ---- who may handle them --------------------------------------------------------------------------------------------


def only_ends_process(handler: Handler) -> Handler:
    """Declares that ``handler`` does nothing but end the process: another may take its place for a while."""
    _that_only_end.append(handler)
    return handler


def may_be_replaced(handler: Any) -> bool:
    """Whether a handler is the system's, or one that only ends the process; not one of the application's."""
    return handler is signal.SIG_DFL or handler in _that_only_end


@contextlib.contextmanager
def handling(
    signals: Iterable[int], handler: Handler, *, replaces: Callable[[Any], bool] = lambda there: there is signal.SIG_DFL
) -> Iterator[dict[int, Any]]:
    """Within, ``handler`` handles those of ``signals`` whose present handler ``replaces`` accepts; yields what was there, by number.

    Off the main thread none are. One that something else has replaced meanwhile stays replaced.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: there for number in signals if replaces(there := signal.getsignal(number))}
    for number in before:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        # What was left open may be ended in another thread.
        if threading.current_thread() is threading.main_thread():
            for number, there in before.items():
                if signal.getsignal(number) == handler:
                    signal.signal(number, there)


# ---- what one means -------------------------------------------------------------------------------------------------


class RepeatedSigterm:
    """Whether SIGTERM was sent a second time, and is not the echo of one request."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_there(self, number: int) -> bool:
        """Called with each signal that comes: whether this one means "now"."""
        if number != signal.SIGTERM:
            return False
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        return now - self._first > _REPEATED_S


@only_ends_process
def leave(number: int, frame: FrameType | None) -> None:
    """The handler that :func:`terminable` sets."""
    silence_closed_terminal(number)
    raise SystemExit(128 + number)


def silence_closed_terminal(number: int) -> None:
    """For the handler of a signal: after SIGHUP of a terminal that is gone, what is written goes nowhere, instead of being an
    error in whoever writes while there is something to save."""
    if number != signal.SIGHUP:
        return
    for descriptor in (1, 2):
        try:
            os.tcgetpgrp(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:  # and not a file or a pipe
                os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), descriptor)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into SystemExit(143) for a while, and SIGHUP into SystemExit(129), so that ``finally`` and ``with`` blocks run on
    the way out. One that is ignored (``nohup``) stays so."""
    with handling(_ENDING, leave):
        yield


# ---- in the process that starts the ranks ---------------------------------------------------------------------------


class FirstStop:
    """The first of :data:`STOP_SIGNALS` that comes within :meth:`handled`, for the ranks to be sent it; SIGTERM again raises
    SystemExit(143).

    Attributes:
        number: the signal that came; None: none did.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._repeated = RepeatedSigterm()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        with handling(STOP_SIGNALS, self._on_signal):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        silence_closed_terminal(number)
        if self._repeated.is_there(number):
            leave(number, frame)


class Forwarded:
    """Each of ``signals`` that comes within :meth:`handled` is counted, to be sent on to the ranks, and ends nothing here.

    Attributes:
        pending: those that came since :meth:`take`.
    """

    def __init__(self, signals: Iterable[int]):
        self.signals = tuple(signals)
        self.pending: list[int] = []

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        with handling(self.signals, self._on_signal):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)

    @property
    def env(self) -> dict[str, str]:
        """What ranks are given, so that these signals do not end them before they are ready."""
        return {BLOCKED_AT_START: " ".join(str(int(number)) for number in self.signals)} if self.signals else {}

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Within, the signals are blocked in this thread, and in the processes that it starts from their beginning to where they
        unblock them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def take(self) -> list[int]:
        """What is pending, once."""
        taken, self.pending = self.pending, []
        return taken


def blocked_at_start() -> set[int]:
    """The signals that a launcher has started this process with blocked; none in a thread that has unblocked them already."""
    named = {int(number) for number in os.environ.get(BLOCKED_AT_START, "").split()}
    return named & set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) if named else named
