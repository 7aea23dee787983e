"""Signals that ask a run to end, as the process that started the ranks hears them."""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

__all__ = [
    "KEPT_BACK",
    "NOTICES",
    "Insistence",
    "Notice",
    "PassedOn",
    "kept_back",
    "leave",
    "let_go_of_terminal",
    "terminable",
]

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers send some time before they end a job, and a terminal (or ssh) that is closed."""

KEPT_BACK = "SHARDWISE_SIGNALS_KEPT_BACK"
"""The variable with the numbers of the signals that a rank starts with blocked: what comes before it is ready is kept for it."""

_ENDS = (signal.SIGTERM, signal.SIGHUP)

_REPEATED_S = 2.0  # `timeout` and some schedulers signal a process and its group: one request that comes twice


class Insistence:
    """Whether SIGTERM comes again, and is not the echo of one request."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_there(self, number: int) -> bool:
        """Told of each signal that comes: whether this one means "now"."""
        if number != signal.SIGTERM:
            return False
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        return now - self._first > _REPEATED_S


class Notice:
    """Within: the first of :data:`NOTICES` that comes is remembered, for the ranks to be told; SIGTERM again raises
    SystemExit(143).

    A signal for which the application has a handler of its own is left to it, and off the main thread all are.

    Attributes:
        number: the signal that came; None: none did.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._insistence = Insistence()
        self._ours: list[int] = []

    def __enter__(self) -> "Notice":
        if threading.current_thread() is threading.main_thread():
            self._ours = [number for number in NOTICES if signal.getsignal(number) is signal.SIG_DFL]
            for number in self._ours:
                signal.signal(number, self._heed)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._ours:
            signal.signal(number, signal.SIG_DFL)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        let_go_of_terminal(number)
        if self._insistence.is_there(number):
            leave(number, frame)


class PassedOn:
    """Within: each of ``signals`` that comes is counted, to be passed on to ranks, and ends nothing here.

    One for which the application has a handler of its own is left to it, and off the main thread all are.

    Attributes:
        pending: those that came since :meth:`take`.
    """

    def __init__(self, signals: Iterable[int]):
        self.signals = tuple(signals)
        self.pending: list[int] = []
        self._ours: list[int] = []

    def __enter__(self) -> "PassedOn":
        if threading.current_thread() is threading.main_thread():
            self._ours = [number for number in self.signals if signal.getsignal(number) is signal.SIG_DFL]
            for number in self._ours:
                signal.signal(number, lambda number, frame: self.pending.append(number))
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._ours:
            signal.signal(number, signal.SIG_DFL)

    @property
    def env(self) -> dict[str, str]:
        """What ranks are given, so that these signals do not end them before they are ready."""
        return {KEPT_BACK: " ".join(str(int(number)) for number in self.signals)} if self.signals else {}

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


def kept_back() -> set[int]:
    """The signals that a launcher has started this process with blocked; none in a thread that has them already."""
    named = {int(number) for number in os.environ.get(KEPT_BACK, "").split()}
    return named & set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) if named else named


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into SystemExit(143) for a while, and SIGHUP into SystemExit(129), so that what has to be ended or said
    is, on the way out.

    One for which the application has a handler of its own is left alone, or which is ignored (``nohup``); off the main thread,
    where Python allows no handlers, both are.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def let_go_of_terminal(number: int) -> None:
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


def leave(number: int, frame: FrameType | None) -> None:
    """The handler that :func:`terminable` sets."""
    let_go_of_terminal(number)
    raise SystemExit(128 + number)
