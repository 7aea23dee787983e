"""Every rank watches its neighbour, so that a lost, stopped or straying rank is named before the group times out.

A thread per rank writes a *beat* into the store every interval: a counter, and where its main thread is ("at window
12, before the step"). It reads its right neighbour's beat; one that stands still for ``silent_s`` belongs to a rank that is
stopped or gone, and the reader raises an *alarm*: a key every rank reads. A rank that fails leaves word the same way, and
the first word counts: what fails later is an echo. So word spreads in one interval, whatever the number of ranks, and
no rank reads more than three keys per interval.

The main thread sees the alarm where it polls (the agreement). One that is blocked inside a collective cannot see it,
and gloo cannot be aborted from outside, so after ``grace_s`` a second thread reports the error to whoever started
this process (or prints it) and ends the process with :data:`EXIT_PEER_LOST`, as NCCL's own watchdog does. The same thread
notices a store that does not answer: the process that keeps it is stopped, and no read of it would ever return.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise._compat import connection_to
from shardwise.errors import RankError
from shardwise.launch.events import report_failure

__all__ = ["EXIT_PEER_LOST", "Watch"]

EXIT_PEER_LOST = 71  # os.EX_OSERR: this process ended itself because a peer was lost
_FIX_LOST = "look at that rank's output for the cause; start the run again"
_HEARD_S = 2.0  # how long the keeper of the store stays after it failed, so that the others can read why
_LEFT = -1  # the counter of a rank that has left on purpose


class Watch:
    """One rank's watcher. :meth:`at` and :meth:`check` are what the main thread calls; both are cheap.

    Args:
        rank, size: this rank among how many.
        store: shared by all ranks, with keys of this world only.
        timeout_s: of the group; silence of a quarter of it (2 to 30 s) is an alarm.
        keeper: the rank in whose process the store lives; None: in a launcher's, or unknown.
        is_current: whether the world still exists; False ends the threads (a group destroyed without a word).
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        store: dist.Store,
        timeout_s: float,
        keeper: int | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ):
        self.rank, self.size = rank, size
        self.silent_s = max(2.0, min(30.0, timeout_s / 4))
        self.interval_s = min(max(0.5, size / 500), self.silent_s / 4)  # the store serves some thousand reads a second
        self.grace_s = 3.0
        self.place = "at start-up"
        self.alarm: RankError | None = None
        self.left_since: float | None = None  # when this rank saw that some rank has left on purpose
        self._keeper, self.is_current = keeper, is_current
        self._fatal = True  # whether the alarm ends a main thread that does not see it
        self._told = False  # the main thread has seen the alarm, or does not need to
        self._left = False
        self._turns = 0  # of the thread that talks to the store
        self._stop = threading.Event()
        self._store, self._main_store = connection_to(store), connection_to(store)
        self._threads = [
            threading.Thread(target=run, name=f"shardwise-{name}", daemon=True)
            for name, run in (("watch", self._talk), ("guard", self._guard))
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the main thread ---------------------------------------------------------------------------------

    def at(self, place: str) -> None:
        """Says where the main thread is."""
        self.place = f"at {place}"

    def past(self, place: str) -> None:
        """Says what the main thread has behind it: until it is somewhere else, it is in code that says nothing."""
        self.place = f"after {place}"

    def check(self) -> None:
        """Raises the alarm, if there is one."""
        if self.alarm is not None:
            self._told = True
            raise self.alarm

    def wait_for_alarm(self, seconds: float) -> RankError | None:
        """The alarm, waiting at most ``seconds`` for it, or for word that a rank has left: a broken connection is often
        felt before word arrives."""
        end = time.monotonic() + seconds
        while self.alarm is None and self.left_since is None and time.monotonic() < end:
            time.sleep(0.02)
        self._told = self._told or self.alarm is not None
        return self.alarm

    def places(self) -> dict[int, str]:
        """Where every rank's main thread says it is (its last beat); unknown ranks are left out."""
        beats = {rank: self._read(self._main_store, f"beat/{rank}") for rank in range(self.size)}
        return {rank: beat["place"] for rank, beat in beats.items() if beat is not None}

    def gone(self) -> tuple[int, ...]:
        """The ranks that have left on purpose."""
        beats = {rank: self._read(self._main_store, f"beat/{rank}") for rank in range(self.size)}
        return tuple(rank for rank, beat in beats.items() if beat is not None and beat["count"] == _LEFT)

    def failed(self, error: BaseException) -> None:
        """Leaves word that this rank ends with ``error``, so that peers name it at once. The first word counts."""
        if self.alarm is None:  # else there is a word already, or a store that does not take one
            what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            blamed = list(error.ranks) if isinstance(error, RankError) else []
            self._raise_alarm(blamed or [self.rank], f"rank {self.rank} failed {self.place}: {what}")
        if self._keeper == self.rank:
            self._wait_until_heard()
        self._told = True  # last: should the store hang, the guard still ends this process

    def leave(self, patience_s: float) -> None:
        """Leaves word that this rank is done, and waits until every rank is.

        Raises:
            RankError: a peer failed or was lost meanwhile, or did not come within ``patience_s``.
        """
        self.check()
        self._say_left()
        self._wait_for_all("left", self.size, patience_s)
        # The store's keeper goes last: the others have then read the number they waited for.
        with contextlib.suppress(RuntimeError):
            self._main_store.add("gone", 1)
            if self._keeper == self.rank:
                self._wait_for_all("gone", self.size, min(patience_s, self.silent_s))

    def leave_unannounced(self) -> None:
        """For a program that ends without closing its world: leaves word, never raises. The store's keeper stays while
        others are alive and need it."""
        self._told = True
        if self.alarm is not None:
            return
        with contextlib.suppress(RuntimeError):
            self._say_left()
            beats, still = "", 0.0
            while self._keeper == self.rank and self._main_store.add("left", 0) < self.size and self.alarm is None:
                now = str(self._beats())
                beats, still = now, (still + 0.1 if now == beats else 0.0)
                if still > self.silent_s:
                    return
                time.sleep(0.1)

    def _beats(self) -> list[dict[str, Any] | None]:
        """The last beat of every other rank."""
        return [self._read(self._main_store, f"beat/{rank}") for rank in range(self.size) if rank != self.rank]

    def stop(self) -> None:
        """Ends the threads."""
        self._stop.set()
        self._told = True
        for thread in self._threads:
            thread.join(timeout=1.0)  # one that waits for a store that does not answer is left behind: a daemon

    # ---- words -----------------------------------------------------------------------------------------------

    def _say_left(self) -> None:
        self.place, self._left = "at the end: it has left", True
        self._beat(self._main_store, _LEFT)
        self._main_store.add("left", 1)

    def _wait_for_all(self, key: str, wanted: int, patience_s: float) -> None:
        start, pause = time.monotonic(), 1e-3
        while self._main_store.add(key, 0) < wanted:
            self.check()
            if time.monotonic() - start > patience_s:
                late = {rank: place for rank, place in self.places().items() if rank not in self.gone()}
                raise RankError(
                    f"rank {self.rank} waited {patience_s:.0f} s for the others to leave",
                    why="; ".join(f"rank {rank} is {place}" for rank, place in late.items()),
                    fix="close the world on every rank, after the same number of windows",
                    ranks=tuple(late),
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _wait_until_heard(self) -> None:
        end = time.monotonic() + _HEARD_S
        with contextlib.suppress(RuntimeError):
            while self._main_store.add("heard", 0) < self.size - 1 and time.monotonic() < end:
                time.sleep(0.02)

    def _beat(self, store: dist.Store, count: int) -> None:
        store.set(f"beat/{self.rank}", json.dumps({"count": count, "place": self.place}))

    @staticmethod
    def _read(store: dist.Store, key: str) -> dict[str, Any] | None:
        return json.loads(store.get(key)) if store.check([key]) else None

    def _raise_alarm(self, ranks: list[int], why: str) -> None:
        try:
            self._main_store.compare_set("alarm", "", json.dumps({"ranks": ranks, "why": why}))
        except RuntimeError as error:
            print(f"shardwise: rank {self.rank} could not leave word ({_first_line(error)}): {why}", file=sys.stderr)

    # ---- the thread that talks to the store ------------------------------------------------------------------

    def _talk(self) -> None:
        neighbour = (self.rank + 1) % self.size
        last, unchanged = None, 0
        while not self._stop.wait(self.interval_s) and self.is_current():
            try:
                self._beat(self._store, _LEFT if self._left else self._turns)
                word, beat = self._read(self._store, "alarm"), self._read(self._store, f"beat/{neighbour}")
                if word is not None:
                    self._store.add("heard", 1)
                elif self.left_since is None and self._store.add("left", 0) > self._left:
                    self.left_since = time.monotonic()
            except RuntimeError as error:
                # Its keeper has ended, and so have its connections: nobody can be stuck waiting for it.
                self._on_alarm(*self._store_lost(f"is gone ({_first_line(error)})"), fatal=False)
                return
            self._turns += 1
            if word is not None:
                self._on_alarm(word["ranks"], word["why"])
                return
            # Counted in turns, not in seconds: after a stop of the whole job nobody has been silent.
            unchanged = unchanged + 1 if beat == last and (beat is None or beat["count"] != _LEFT) else 0
            last = beat
            if unchanged * self.interval_s > self.silent_s:
                where = beat["place"] if beat else "at start-up"
                why = f"rank {neighbour} gave no sign of life for {self.silent_s:.0f} s; it was last {where}"
                self._raise_alarm([neighbour], why)
                unchanged = 0  # the alarm is read at the next turn: another rank's word may have come first

    def _store_lost(self, what: str) -> tuple[list[int], str]:
        if self._keeper is None:
            return [], f"the store that the launcher keeps for the ranks {what}"
        return [self._keeper], f"the store kept by rank {self._keeper} {what}"

    def _on_alarm(self, ranks: list[int], why: str, *, fatal: bool = True) -> None:
        if self._stop.is_set() or not self.is_current():
            return
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "the launcher"
        given = f"{who} was lost while rank {self.rank} was {self.place}"
        if self.rank in ranks:  # it did not come where they waited, or was silent for too long
            given = f"rank {self.rank} was given up by the others while it was {self.place}"
        self._fatal = fatal
        self.alarm = RankError(given, why=why, fix=_FIX_LOST, ranks=tuple(ranks))

    # ---- the thread that ends a process nobody else can --------------------------------------------------------

    def _guard(self) -> None:
        tick = min(0.1, self.interval_s)
        turns, stalled, since_alarm = 0, 0.0, 0.0
        while not self._stop.wait(tick) and self.is_current() and not (self.alarm and not self._fatal):
            stalled = 0.0 if turns != self._turns else stalled + tick
            turns = self._turns
            if self.alarm is None and stalled > self.silent_s + self.interval_s:
                self._on_alarm(*self._store_lost(f"has not answered for {self.silent_s:.0f} s"))
            since_alarm = since_alarm + tick if self.alarm is not None and not self._told else 0.0
            if since_alarm > self.grace_s and self.alarm is not None:
                self._end_process(self.alarm)

    def _end_process(self, alarm: RankError) -> None:
        if not report_failure(alarm):
            print(f"shardwise: rank {self.rank} ends itself.\nRankError: {alarm}", file=sys.stderr, flush=True)
        os._exit(EXIT_PEER_LOST)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:120]
