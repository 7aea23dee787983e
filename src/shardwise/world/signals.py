"""Requests to stop in order, or to save and continue: by a signal, by a time limit, or by the program itself.

A request reaches one rank, at any moment, or all of them at different ones. The first exchange of every window sends
the requests so far to all ranks, so that each of them stops, or saves, after the same window.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from shardwise.launch.stop_signals import (
    STOP_SIGNALS,
    RepeatedSigterm,
    blocked_at_start,
    handling,
    leave,
    may_be_replaced,
    pass_over,
    silence_closed_terminal,
)

Reason = Literal["SIGTERM", "SIGUSR1", "SIGHUP", "the time limit", "a call of stop()"]
REASONS: tuple[Reason, ...] = ("SIGTERM", "SIGUSR1", "SIGHUP", "the time limit", "a call of stop()")


class EndOfRun(Exception):  # noqa: N818 -- nothing is wrong
    """Raised on all ranks in place of a window, before its first forward: a rank has asked that the window before it is the
    last one. Nothing has changed."""


class StopRequest:
    """Whether the ranks of a world were asked to stop, to save, or to end the run as if it were done.

    Attributes:
        agreed: who asked for a stop, as text, once all ranks know of it; None: continue. Equal on every rank.
        saves: whether a checkpoint was asked for, from when all ranks know of it until it is saved. Equal on every
            rank.
        ends: whether the run ends before the window that begins, in order: then a stop is not wanted any more. Equal on
            every rank.
        num_ignored: windows that were begun since a stop was agreed.
    """

    def __init__(self) -> None:
        self.agreed: str | None = None
        self.saves = self.ends = False
        self._asks_for_end = False
        self.num_ignored = 0
        self._asked: set[Reason] = set()
        # Counted: a request that arrives between the entry and the sum of an exchange belongs to the next exchange.
        self._num_saves = self._num_told = self._num_known = 0
        self._deadline = float("inf")  # of time.monotonic, which is not affected when the system clock is set

    def ask(self, reason: Reason) -> None:
        """Asks for a stop; may be called by a signal handler or another thread. One rank is enough."""
        self._asked.add(reason)

    def ask_for_save(self) -> None:
        """Asks for a checkpoint, after which the run continues; may be called like :meth:`ask`."""
        self._num_saves += 1

    def ask_for_end(self) -> None:
        """Asks that no other window is run: the next one raises :class:`EndOfRun` on all ranks. One rank is enough."""
        self._asks_for_end = True

    def entry(self, *, goes_on: bool = True) -> Tensor:
        """This rank's requests, as an entry of an exchange; a time limit counts only if the run ``goes_on``."""
        if goes_on and time.monotonic() >= self._deadline:
            self._asked.add("the time limit")
        self._num_told = self._num_saves
        flags = [*(reason in self._asked for reason in REASONS), self._num_told > self._num_known, self._asks_for_end]
        return torch.tensor([float(flag) for flag in flags], dtype=torch.float64)

    def agree(self, summed: Tensor) -> None:
        """Takes over the sum of all ranks' entries."""
        self.num_ignored = self.num_ignored + 1 if self.agreed else 0
        *counts, saves, ends = summed.tolist()
        asked = [reason for reason, count in zip(REASONS, counts, strict=True) if count]
        self.saves, self._num_known = self.saves or bool(saves), self._num_told
        self.ends = bool(ends)
        self.agreed = None if self.ends else " and ".join(asked) or None

    def settle(self) -> None:
        """Called when the stop, the save or the end is done: clears the requests."""
        self.num_ignored = 0
        self.agreed, self._asked, self._deadline, self.saves = None, set(), float("inf"), False
        self.ends = self._asks_for_end = False

    @contextlib.contextmanager
    def handle_stop_signals(self, limit_s: float | None, *, usr1_saves: bool = False) -> Iterator[None]:
        """Context manager: SIGTERM, SIGUSR1 and SIGHUP are stop requests, and so is the end of ``limit_s`` seconds from
        now. A second SIGTERM raises SystemExit(143). With ``usr1_saves``, SIGUSR1 asks for a checkpoint and not for a
        stop; one that the launcher had blocked is delivered now.

        A signal for which the application has its own handler is left to it. Outside the main thread, where Python
        allows no handlers, all are.
        """
        self.settle()
        if limit_s is not None:
            self._deadline = time.monotonic() + limit_s
        home, is_over, repeated = os.getpid(), False, RepeatedSigterm()

        def request(number: int, frame: FrameType | None) -> None:
            silence_closed_terminal(number)
            if os.getpid() != home or is_over:  # for example a forked worker: it ends as it would without this handler
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            elif usr1_saves and number == signal.SIGUSR1:
                self.ask_for_save()
            else:
                self.ask(signal.Signals(number).name)  # type: ignore[arg-type]
                if repeated.is_repeat(number):
                    leave(number, frame)

        with handling(STOP_SIGNALS, request, replaces=may_be_replaced) as before:
            forwarded = blocked_at_start() & set(before)
            # Blocking it again would not be enough: threads that were started meanwhile have it unblocked.
            before.update(dict.fromkeys(forwarded, pass_over))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
            try:
                yield
            finally:
                is_over, self._deadline = True, float("inf")
