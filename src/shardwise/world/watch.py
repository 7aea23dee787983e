"""Every rank watches its neighbour, so that a lost, stopped or straying rank is named before the group times out.

A thread per rank writes a *beat* into the store every interval: a counter, and where its main thread is ("window 12,
forward"). It reads its right neighbour's beat; one that does not change for ``silent_s`` is stopped or gone, and the
watcher raises an *alarm*: a key every watcher reads. A rank that fails leaves word the same way. So word spreads in one
interval, whatever the number of ranks, and no rank reads more than two keys per interval.

The main thread sees the alarm where it polls (the agreement). One that is blocked inside a collective cannot see it,
and gloo cannot be aborted from outside, so after ``grace_s`` the watcher prints the error and ends the process
with :data:`EXIT_PEER_LOST`, as NCCL's own watchdog does.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from shardwise._compat import default_store
from shardwise.errors import RankError

__all__ = ["EXIT_PEER_LOST", "Watch", "fatal_hooks"]

EXIT_PEER_LOST = 71  # os.EX_OSERR: this process ended itself because a peer was lost
fatal_hooks: list[Callable[[RankError], None]] = []  # called before a process ends itself, as by a launcher
_FIX_LOST = "look at that rank's output for the cause; start the run again"


class Watch:
    """One rank's watcher. :meth:`at` and :meth:`check` are what the main thread calls; both are cheap."""

    def __init__(self, rank: int, world_size: int, *, timeout_s: float, prefix: str, interval_s: float = 0.5):
        self.rank, self.world_size = rank, world_size
        self.silent_s = max(2.0, min(30.0, timeout_s / 4))
        self.interval_s = min(interval_s, self.silent_s / 4)
        self.grace_s = 3.0
        self._prefix = prefix
        self.place = "start-up"
        self.alarm: RankError | None = None
        self._told = False  # the main thread has seen the alarm
        self._stop = threading.Event()
        self._store = default_store().clone()
        self._thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)
        self._thread.start()

    # ---- for the main thread ---------------------------------------------------------------------------------

    def at(self, place: str) -> None:
        """Says where the main thread is."""
        self.place = place

    def check(self) -> None:
        """Raises the alarm, if there is one."""
        if self.alarm is not None:
            self._told = True
            raise self.alarm

    def wait_for_alarm(self, seconds: float) -> RankError | None:
        """The alarm, waiting at most ``seconds`` for it: a broken connection is often felt before word arrives."""
        end = time.monotonic() + seconds
        while self.alarm is None and time.monotonic() < end:
            time.sleep(0.02)
        self._told = True
        return self.alarm

    def places(self) -> dict[int, str]:
        """Where every rank's main thread says it is (its last beat); unknown ranks are left out."""
        found = {}
        for rank in range(self.world_size):
            beat = self._read(f"beat/{rank}")
            if beat is not None:
                found[rank] = beat["place"]
        return found

    def failed(self, error: BaseException) -> None:
        """Leaves word that this rank ends with ``error``, so that peers name it at once."""
        what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        self._raise_alarm([self.rank], f"rank {self.rank} failed at {self.place}: {what}")

    def left(self) -> None:
        """Leaves word that this rank has left its loop on purpose."""
        self.place = "left (its world was closed)"
        self._beat(-1)

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._told = True
        self._thread.join(timeout=5 * self.interval_s + 1)

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        neighbour = (self.rank + 1) % self.world_size
        last, changed, count = None, time.monotonic(), 0
        while not self._stop.wait(self.interval_s):
            count += 1
            try:
                self._beat(count)
                alarm = self._read("alarm")
                beat = self._read(f"beat/{neighbour}")
            except RuntimeError as error:  # the store's own process is gone
                if not self._stop.is_set():
                    self._on_alarm([0], f"the store, kept by rank 0 or its launcher, is gone ({_first_line(error)})")
                return
            if alarm is not None:
                self._on_alarm(alarm["ranks"], alarm["why"])
                return
            if beat != last:
                last, changed = beat, time.monotonic()
            elif time.monotonic() - changed > self.silent_s:
                where = beat["place"] if beat else "start-up"
                why = f"rank {neighbour} gave no sign of life for {self.silent_s:.0f} s; it was last at {where}"
                self._raise_alarm([neighbour], why)
                self._on_alarm([neighbour], why)
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"{self._prefix}/beat/{self.rank}", json.dumps({"count": count, "place": self.place}))

    def _read(self, key: str) -> dict[str, Any] | None:
        key = f"{self._prefix}/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _raise_alarm(self, ranks: list[int], why: str) -> None:
        try:
            self._store.set(f"{self._prefix}/alarm", json.dumps({"ranks": ranks, "why": why}))
        except RuntimeError as error:
            print(f"shardwise: rank {self.rank} could not leave word ({_first_line(error)}): {why}", file=sys.stderr)

    def _on_alarm(self, ranks: list[int], why: str) -> None:
        self.alarm = RankError(
            f"rank {', '.join(map(str, ranks))} was lost while rank {self.rank} was at {self.place}",
            why=why,
            fix=_FIX_LOST,
            ranks=tuple(ranks),
        )
        end = time.monotonic() + self.grace_s
        while time.monotonic() < end:
            if self._told or self._stop.wait(0.05):
                return
        for tell in fatal_hooks:
            tell(self.alarm)
        print(f"shardwise: rank {self.rank} ends itself.\nRankError: {self.alarm}", file=sys.stderr, flush=True)
        os._exit(EXIT_PEER_LOST)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:120]
