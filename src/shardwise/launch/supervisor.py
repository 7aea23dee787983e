"""The launcher's loop: reads output of the ranks, notices how they end, and ends the rest."""

import selectors
import signal
import time
from collections.abc import Callable

from shardwise.launch.failure import Failure, named_by
from shardwise.launch.process import Guard
from shardwise.launch.rank import RankProcess
from shardwise.launch.stop_signals import FirstStop, Forwarded

TICK_S = 0.05
_SETTLE_S = 0.7
_DRAIN_S = 1.0
_DUMP_S = 0.5


class Supervisor:
    """The launcher's loop: reads output of the ranks, notices how they end, and ends the rest."""

    def __init__(
        self,
        guard: Guard,
        grace_s: float,
        timeout_s: float | None,
        stopped_s: float,
        on_event: Callable[[int, dict], None],
    ):
        self.ranks: list[RankProcess] = []
        self._on_event = on_event
        self.blamed: list[Failure] = []
        self._guard, self._grace_s, self._timeout_s, self._stopped_s = guard, grace_s, timeout_s, stopped_s
        self._selector = selectors.DefaultSelector()
        self._started = time.monotonic()

    def add(self, rank: RankProcess) -> None:
        """Takes over a started rank and sends it its job."""
        self.ranks.append(rank)
        self._guard.add(rank.pid)
        for descriptor in rank.streams():
            self._selector.register(descriptor, selectors.EVENT_READ, rank)
        rank.begin()

    def run(self, stop: FirstStop, notice_s: float | None, forwarded: Forwarded) -> None:
        """Runs until every rank has ended, the first failure is understood, or the time after a stop signal is over."""
        failed_at: float | None = None
        sent_at: float | None = None
        while self._alive():
            self._turn()
            now = time.monotonic()
            for number in forwarded.take():
                for rank in self.ranks:
                    rank.tell(number)
            if stop.number is not None and sent_at is None:
                sent_at = now
                self._on_event(0, {"kind": "asked_to_stop", "signal": signal.Signals(stop.number).name})
                for rank in self.ranks:
                    rank.tell(stop.number)
            if sent_at is not None and now - sent_at > (notice_s or 0.0):
                raise SystemExit(128 + (stop.number or 0))
            if failed_at is None and (self._look() or any(rank.failure for rank in self.ranks)):
                failed_at = now
            # Gives the others a moment to report: the first reported failure is not always the cause.
            if failed_at is not None and (self.blamed or now - failed_at > _SETTLE_S):
                self._blame_stopped()
                self._explain()
                return
        self._drain()

    @property
    def is_late(self) -> bool:
        return self._timeout_s is not None and time.monotonic() - self._started > self._timeout_s

    def _alive(self) -> bool:
        return not all(rank.poll() for rank in self.ranks)

    def _turn(self, wait_s: float = TICK_S) -> bool:
        ready = self._selector.select(wait_s)
        for key, _ in ready:
            key.data.read(key.fd)
            if key.fd not in key.data.streams():
                self._selector.unregister(key.fd)
        self._settle()
        return bool(ready)

    def _settle(self) -> None:
        for rank in self.ranks:
            if rank.poll() and rank.failure is None and (rank.code or rank.result is None):
                # Its report may still be in the pipe; without one, only its exit code is known.
                for descriptor in rank.streams():
                    self._drain_one(rank, descriptor)
                rank.settle()

    def _drain_one(self, rank: RankProcess, descriptor: int) -> None:
        deadline = time.monotonic() + _DRAIN_S
        with selectors.DefaultSelector() as one:
            one.register(descriptor, selectors.EVENT_READ)
            while descriptor in rank.streams() and time.monotonic() < deadline:
                if not one.select(TICK_S):
                    break
                rank.read(descriptor)
        if descriptor not in rank.streams():
            self._selector.unregister(descriptor)

    def _drain(self) -> None:
        # A pipe ends when its last writer closes it; one held open by a process outside the rank's session is given up.
        deadline = time.monotonic() + _DRAIN_S
        while self._selector.get_map() and time.monotonic() < deadline:
            self._turn()
        self._settle()  # the last rank's pipes may end before its process does, and then no turn follows its end

    def _look(self) -> bool:
        """Checks for failures without an exit: a stopped rank, and the time limit."""
        running = [rank for rank in self.ranks if not rank.poll()]
        stopped = [rank for rank in running if rank.stopped_for() > self._stopped_s]
        if stopped:
            self.blamed = [_stopped(rank.rank, rank.pid, self._stopped_s) for rank in stopped]
        elif self.is_late:
            self.blamed = [_late(rank.rank, self._timeout_s) for rank in running]
        return bool(self.blamed)

    def _blame_stopped(self) -> None:
        """Ranks that others report as lost, and that are stopped: this says why they are silent."""
        named = set().union(*(named_by(rank.failure) for rank in self.ranks if rank.failure is not None))
        for rank in self.ranks:
            if rank.rank in named and not self.blamed and (seconds := rank.stopped_for()):
                self.blamed = [_stopped(rank.rank, rank.pid, int(seconds))]

    def _explain(self) -> None:
        """If no rank failed by itself, lets running ranks print their stacks; if failures name ranks as the cause, only
        those."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        if any(not failure.weight for failure in failures):
            return
        named = set().union(*map(named_by, failures))
        for rank in self.ranks:
            if not named or rank.rank in named:
                rank.dump_stacks()
        deadline = time.monotonic() + _DUMP_S
        while time.monotonic() < deadline:
            self._turn()

    def close(self) -> None:
        """Ends all running ranks: SIGTERM, ``grace_s`` seconds to leave in order, SIGKILL."""
        blamed = {rank: rank.failure for rank in self.ranks}
        try:
            self._end(signal.SIGTERM, self._grace_s)
        finally:
            # A second Ctrl-C, or a callback that fails, leads here at once.
            for rank in self.ranks:
                rank.signal(signal.SIGKILL)
            while self._alive():
                time.sleep(0.01)
            for rank in self.ranks:
                # A rank that was ended by this method did not fail.
                rank.failure = blamed[rank]
                self._guard.remove(rank.pid)
                rank.close()
            self._selector.close()

    def _end(self, number: int, grace_s: float) -> None:
        if not self._alive():
            return
        for rank in self.ranks:
            # A stopped process sees no other signal.
            rank.signal(signal.SIGKILL if rank.stopped_for() else number)
        deadline = time.monotonic() + grace_s
        while self._alive() and time.monotonic() < deadline:
            self._turn()
        self._drain()


def _stopped(rank: int, pid: int, limit_s: float) -> Failure:
    return Failure(
        rank=rank,
        what="is stopped",
        detail=f"process {pid} has been in state T for more than {limit_s:g} s, and its peers wait for it",
        fix="it was sent SIGSTOP: find who sent it",
    )


def _late(rank: int, timeout_s: float | None) -> Failure:
    return Failure(
        rank=rank,
        what=f"did not finish within {timeout_s:g} s",
        detail="it was still running; the lines 'most recent call first' on its stderr show where",
        fix="raise timeout_s if it was only slow",
    )
