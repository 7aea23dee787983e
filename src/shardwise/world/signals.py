"""Requests to stop in order, or to save and go on: by a signal, by the clock, or by the program itself.

A request reaches one rank, at any moment, or all of them at different ones. The first exchange of every window tells all
ranks of those so far, so that each of them stops, or saves, after the same window.
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
    only_ends_process,
    silence_closed_terminal,
)

__all__ = ["StopRequest"]

Reason = Literal["SIGTERM", "SIGUSR1", "SIGHUP", "the time limit", "a call of stop()"]
REASONS: tuple[Reason, ...] = ("SIGTERM", "SIGUSR1", "SIGHUP", "the time limit", "a call of stop()")


class StopRequest:
    """Whether the ranks of a world were asked to stop.

    Attributes:
        agreed: who asked, in words, once all ranks know of it; None: go on. Equal on every rank.
        saves: whether a checkpoint was asked for, once all ranks know of it, until there is one. Equal on every rank.
    """

    def __init__(self) -> None:
        self.agreed: str | None = None
        self.saves = False
        self._asked: set[Reason] = set()
        # Counted, not noted: a request that comes between the entry and the sum of an exchange is one for the next.
        self._num_saves = self._num_told = self._num_known = 0
        self._deadline = float("inf")  # of time.monotonic: a clock that is set has no effect on it

    def ask(self, reason: Reason) -> None:
        """Asks for a stop; from a handler of a signal or another thread, too. One rank is enough."""
        self._asked.add(reason)

    def ask_for_save(self) -> None:
        """Asks for a checkpoint, after which the run goes on; as :meth:`ask` does."""
        self._num_saves += 1

    def entry(self, *, goes_on: bool = True) -> Tensor:
        """This rank's requests, for an exchange; a time limit counts only where the run ``goes_on``."""
        if goes_on and time.monotonic() >= self._deadline:
            self._asked.add("the time limit")
        self._num_told = self._num_saves
        flags = [*(reason in self._asked for reason in REASONS), self._num_told > self._num_known]
        return torch.tensor([float(flag) for flag in flags], dtype=torch.float64)

    def agree(self, summed: Tensor) -> None:
        """Takes in the sum of all ranks' entries."""
        *counts, saves = summed.tolist()
        asked = [reason for reason, count in zip(REASONS, counts, strict=True) if count]
        self.saves, self._num_known = self.saves or bool(saves), self._num_told
        self.agreed = " and ".join(asked) or None

    def settle(self) -> None:
        """What was asked for has been done."""
        self.agreed, self._asked, self._deadline, self.saves = None, set(), float("inf"), False

    @contextlib.contextmanager
    def handle_stop_signals(self, limit_s: float | None, *, usr1_saves: bool = False) -> Iterator[None]:
        """Within: SIGTERM, SIGUSR1 and SIGHUP are requests, and so is the end of ``limit_s`` seconds from now. SIGTERM again
        raises SystemExit(143). With ``usr1_saves``, SIGUSR1 asks for a checkpoint and for no stop; one that a launcher kept back comes now.

        A signal for which the application has a handler of its own is left to it, and off the main thread, where Python
        allows no handlers, all are.
        """
        self.settle()
        if limit_s is not None:
            self._deadline = time.monotonic() + limit_s
        home, is_over, repeated = os.getpid(), False, RepeatedSigterm()

        def request(number: int, frame: FrameType | None) -> None:
            silence_closed_terminal(number)
            if os.getpid() != home or is_over:  # a worker that was forked, say: it ends as it would have
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            elif usr1_saves and number == signal.SIGUSR1:
                self.ask_for_save()
            else:
                self.ask(signal.Signals(number).name)  # type: ignore[arg-type]
                if repeated.is_there(number):
                    leave(number, frame)

        with handling(STOP_SIGNALS, request, replaces=may_be_replaced) as before:
            forwarded = blocked_at_start() & set(before)
            before.update(dict.fromkeys(forwarded, _too_late))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
            try:
                yield
            finally:
                is_over, self._deadline = True, float("inf")


@only_ends_process
def _too_late(number: int, frame: FrameType | None) -> None:
    """The handler, from the end of a manager on, of a signal that a launcher forwards: it ends nothing. To block it again would not do,
    since threads that were started meanwhile have it unblocked."""
