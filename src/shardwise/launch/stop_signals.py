"""Signals that ask a run to stop: which they are, who may handle them, and how the launcher handles them.

Every handler of such a signal is set here or with functions of this file (:func:`handling`, :func:`may_be_replaced`),
so one rule holds for all: an application's own handler is left alone, and outside the main thread, where Python allows
no handlers, nothing is set.

* In the launcher: :class:`FirstStop` sends one stop request on to its ranks, :class:`Forwarded` every signal,
  :func:`terminable` ends the code that runs inside it in order.
* In a rank: ``world/signals.py`` turns a signal into a request that all ranks agree on; ``world/termination.py`` names
  a lost peer before SIGTERM ends the process.
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

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that schedulers send some time before they end a job, and a closed terminal (or ssh) sends."""

BLOCKED_AT_START = "SHARDWISE_SIGNALS_BLOCKED_AT_START"
"""Environment variable with the signals that a rank starts with blocked; they are kept until it is ready for them."""

_ENDING = (signal.SIGTERM, signal.SIGHUP)

_REPEATED_S = 2.0  # `timeout` and some schedulers signal a process and its group: one request that arrives twice

Handler = Callable[[int, FrameType | None], Any]

_replaceable: list[Handler] = []


# ---- who may handle them --------------------------------------------------------------------------------------------


def replaceable(handler: Handler) -> Handler:
    """Declares that ``handler`` only ends the process, or does nothing, so that another may replace it for a while."""
    _replaceable.append(handler)
    return handler


def may_be_replaced(handler: Any) -> bool:
    """Whether a handler is the system's, or a :func:`replaceable` one; not an application's own."""
    return handler is signal.SIG_DFL or handler in _replaceable


@contextlib.contextmanager
def handling(
    signals: Iterable[int], handler: Handler, *, replaces: Callable[[Any], bool] = lambda there: there is signal.SIG_DFL
) -> Iterator[dict[int, Any]]:
    """Context manager: ``handler`` handles those of ``signals`` whose current handler ``replaces`` accepts. Yields the
    previous handlers, by signal number.

    Does nothing outside the main thread. A handler that something else has replaced meanwhile is not restored.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: there for number in signals if replaces(there := signal.getsignal(number))}
    for number in before:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        # A context that was left open may be closed in another thread.
        if threading.current_thread() is threading.main_thread():
            for number, there in before.items():
                if signal.getsignal(number) == handler:
                    signal.signal(number, there)


# ---- what one means -------------------------------------------------------------------------------------------------


class RepeatedSigterm:
    """Detects a second SIGTERM that is not the echo of one request."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_repeat(self, number: int) -> bool:
        """Called with each signal that arrives: whether this one means "stop now"."""
        if number != signal.SIGTERM:
            return False
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        return now - self._first > _REPEATED_S


@replaceable
def leave(number: int, frame: FrameType | None) -> None:
    """The signal handler that :func:`terminable` sets: raises SystemExit(128 + number)."""
    silence_closed_terminal(number)
    raise SystemExit(128 + number)


def silence_closed_terminal(number: int) -> None:
    """For a signal handler: after SIGHUP of a closed terminal, output is discarded. Writing would otherwise raise an
    error while there may be something to save."""
    if number != signal.SIGHUP:
        return
    for descriptor in (1, 2):
        try:
            os.tcgetpgrp(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:  # a terminal that is gone, not a file or a pipe
                os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), descriptor)


@contextlib.contextmanager
def terminable(signals: Iterable[int] = _ENDING) -> Iterator[None]:
    """Context manager: SIGTERM raises SystemExit(143), and SIGHUP SystemExit(129), or each of ``signals`` likewise, so that
    ``finally`` and ``with`` blocks run. A signal that is ignored (``nohup``) stays ignored."""
    with handling(signals, leave):
        yield


@replaceable
def pass_over(number: int, frame: FrameType | None) -> None:
    """A signal handler that does nothing. Unlike SIG_IGN it is not inherited by the programs that are started."""


@contextlib.contextmanager
def passed_over(signals: Iterable[int]) -> Iterator[None]:
    """Context manager: ``signals`` end nothing, where the system would end the process, until another handler of this
    package takes them, and again after that."""
    with handling(signals, pass_over):
        yield


# ---- in the process that starts the ranks ---------------------------------------------------------------------------


class FirstStop:
    """Records the first of :data:`STOP_SIGNALS` received within :meth:`handled`, to be sent on to the ranks. A second
    SIGTERM raises SystemExit(143).

    Attributes:
        number: the signal received; None: none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._repeated = RepeatedSigterm()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        with handling(STOP_SIGNALS, self._on_signal, replaces=may_be_replaced):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        silence_closed_terminal(number)
        if self._repeated.is_repeat(number):
            leave(number, frame)


class Forwarded:
    """Records each of ``signals`` received within :meth:`handled`, to be sent on to the ranks; it ends nothing here."""

    def __init__(self, signals: Iterable[int]):
        self.signals = tuple(signals)
        self.pending: list[int] = []

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        with handling(self.signals, self._on_signal, replaces=may_be_replaced):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for the ranks, so that these signals do not end them before they are ready."""
        return {BLOCKED_AT_START: " ".join(str(int(number)) for number in self.signals)} if self.signals else {}

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Context manager: the signals are blocked in this thread, and in the processes it starts, from their beginning
        until they unblock them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def take(self) -> list[int]:
        taken, self.pending = self.pending, []
        return taken


def blocked_at_start() -> set[int]:
    """The signals that a launcher started this process with blocked; empty in a thread that has unblocked them."""
    named = {int(number) for number in os.environ.get(BLOCKED_AT_START, "").split()}
    return named & set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) if named else named
