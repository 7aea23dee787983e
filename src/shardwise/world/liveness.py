"""Every rank watches the others: one whose process ended is named within seconds, one that does not come is reported.

Two kinds of evidence are kept apart. A process that *ended* closes its connections
(:mod:`shardwise.world.connections`), and a rank that fails leaves a message: either is an *alarm*, a key in the store
that every rank reads, and ends the run. The first message counts: later failures are its consequences. *Silence* is no
alarm, since a process may be stopped, held by a debugger or busy in C code, and continue: a rank that waits for such a
one prints that, and the run ends when the timeout of the group has passed.

A thread per rank writes a *beat* into the store every interval: a counter, and where its main thread is ("at window 12,
before the step"). It reads the alarm and its right neighbour's beat, and all beats when its main thread waits for long.
So an alarm reaches all ranks in one interval, whatever their number. The main thread sees the alarm where it polls (the
agreement); if it cannot, a second thread, :mod:`shardwise.world.watchdog`, ends the process.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from shardwise._torch.groups import connection_to
from shardwise.errors import RankError, first_line
from shardwise.world.beats import HAS_LEFT, Beat, Beats, Word, leave_beat, leave_word, read_word, within
from shardwise.world.connections import LEFT
from shardwise.world.crossed import Crossed, elsewhere
from shardwise.world.neighbours import connect
from shardwise.world.waiting import Wait, WaitReport, missing
from shardwise.world.watchdog import Watchdog

_FIX_LOST = "look at that rank's output for the cause; start the run again"
_FIX_CROSSED = (
    "give every rank the same number of forwards and backwards, in the same order, generate among them; where no layer is cut each may run as many "
    "forwards as it likes within sw.gathered(model)"
)
_CROSSED_S = 4.0  # how long a rank is blocked before it checks whether those it waits for are elsewhere
_HEARD_S = 2.0  # how long the keeper of the store stays after it failed, so that the others can read why
_READ_S = 2.0  # how long the main thread waits for an answer of the store when it looks for missing ranks
_SILENT_S = 30.0  # after which a rank that no rank waits for is taken for gone
_STOP_S = 3.0  # in which a thread ends, on a busy machine too
_LEAVING = "for the others to leave"


class Watch:
    """One rank's watcher of the others. The main thread calls :meth:`at` and :meth:`check`; both are cheap.

    Args:
        rank, size: this rank, and the number of ranks.
        store: shared by all ranks, with keys of this world only.
        timeout_s: timeout of the group, in seconds.
        master: the host by whose route this rank's address is found.
        is_one_host: all ranks are on this host.
        keeper: the rank in whose process the store lives; None: in a launcher's process, or unknown.
        is_current: whether the world still exists; False ends the threads (a group destroyed without closing the
            world).
    """

    LOST = "for word of a lost rank"  # what a rank waits in after its collective has failed

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        store: dist.Store,
        timeout_s: float,
        master: str,
        is_one_host: bool,
        keeper: int | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ):
        self.rank, self.size, self.timeout_s, self.is_current = rank, size, timeout_s, is_current
        self.report_s = max(2.0, min(9.0, timeout_s / 4))  # 9: printed before 10 s are over, on a busy machine too
        self.interval_s = max(0.5, size / 500)  # the store serves some thousand reads a second
        self.place = "at start-up"
        self.alarm: RankError | None = None
        self.left_since: float | None = None  # when this rank saw that some rank has left on purpose
        self.is_told = False  # the main thread has seen the alarm, or does not need to
        self.is_asked = False  # the alarm is of a rank that was sent SIGTERM
        self.is_broken = False  # a collective has failed: if the process ends now, a lost peer is the cause
        self.turns = 0  # turns of the thread that talks to the store
        self.waits: Wait | None = None  # in an exchange
        self.busy: Wait | None = None  # with what :meth:`doing` says
        self.exchanges = 0  # number of exchanges that this rank has come to
        self._behind = (0, "")  # the last one that all ranks have passed, and its place
        self._process = f"{os.getpid()} on {socket.gethostname()}"
        self.keeper, self._left = keeper, False
        self.stopped = threading.Event()
        self._store, self._main_store = connection_to(store), connection_to(store)
        self.open_store = lambda: connection_to(store)  # for threads that seldom need one: a read blocks its connection
        self.watchdog = watchdog = Watchdog(self, threading.current_thread(), self.stopped)
        self._crossed: dict[str, Crossed] = {}  # by process group
        self.report = WaitReport(rank, self.report_s, timeout_s)
        self.report_of_busy = WaitReport(rank, self.report_s, timeout_s)
        self.beats = Beats(self._store, rank, size, lambda: watchdog.awake_s)
        self.connections = connect(self, self.open_store, master=master, is_one_host=is_one_host)
        self._beat(self._main_store)
        self._thread = threading.Thread(target=self._talk, name="shardwise-watch", daemon=True)
        self._thread.start()
        self.watchdog.start()

    # ---- for the main thread ---------------------------------------------------------------------------------

    def at(self, place: str) -> None:
        """Records where the main thread is, and that it waits there for all ranks: in an exchange."""
        self.exchanges += 1
        self.place, self.waits = f"at {place}", Wait(f"at {place}", self.watchdog.awake_s)

    def past(self, place: str) -> None:
        """Records what the main thread has passed: until the next record, it is in code that reports nothing."""
        self.place, self.waits, self._behind = f"after {place}", None, (self.exchanges, place)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Context manager: errors of ranks that wait for this one say that it is ``what`` ("reading data"), and so does a line on
        stderr if that takes long, as all ranks may do it at once. For the main thread alone: another one may read for it, beside
        what it does."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self.place, self.busy = self.place, what, Wait(what, self.watchdog.awake_s)
        try:
            yield
        finally:
            self.place, self.busy = before, None

    def gathers_with(self, ranks: tuple[int, ...], group: Any) -> None:
        """Records with which ranks this one gathers and reduces units, or shares layers, and in which process group."""
        name = getattr(group, "group_name", "")
        self._crossed[name] = Crossed(tuple(rank for rank in ranks if rank != self.rank), name)

    def check(self) -> None:
        """Raises the alarm, if there is one."""
        if self.alarm is not None:
            self.is_told = True
            raise self.alarm

    def wait_for_alarm(self, seconds: float) -> RankError | None:
        """The alarm, waiting at most ``seconds`` for it or for the message that a rank has left: a broken connection is
        often noticed before the message arrives."""
        start, watchdog = self.watchdog.awake_s, self.watchdog
        while (
            self.alarm is None
            and self.left_since is None
            and watchdog.awake_s - start < seconds
            and watchdog.is_alive()
        ):
            time.sleep(0.02)
        return self.alarm

    def note_broken_collective(self) -> None:
        """Called when a collective has failed: until a rank is named, this one waits for a message about it."""
        self.is_broken, self.waits = True, Wait(self.LOST, self.watchdog.awake_s)

    def missing(self, what: str, *, silent_s: float | None = None) -> tuple[tuple[int, ...], str]:
        """The ranks that do not wait in ``what``, and where they are, as text.

        Args:
            what: what this rank waits in, like :attr:`Wait.what`.
            silent_s: seconds without a beat that count as silence; None: half the time after which a wait is reported.
        """
        found = within(_READ_S, lambda: self._missing(what, silent_s))
        if found is None:
            word = self.store_lost(f"has not answered for {max(self.watchdog.stalled_s, _READ_S):.0f} s")
            return tuple(word.ranks), word.why
        return found

    def gone(self) -> tuple[int, ...]:
        beats = within(_READ_S, self.beats.read) or {}
        return tuple(rank for rank, beat in beats.items() if beat.has_left)

    def failed(self, error: BaseException) -> None:
        """Leaves the message that this rank ends with ``error``, so that peers name it. The first message counts."""
        if self.alarm is None:  # else there is a message already, or a store that does not accept one
            what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            blamed = list(error.ranks) if isinstance(error, RankError) else []
            has_quit = isinstance(error, SystemExit) and not error.code
            how = f"ended its program {self.place}" if has_quit else f"failed {self.place}: {what}"
            word = Word(blamed or [self.rank], f"rank {self.rank} {how}")
            try:
                leave_word(self._main_store, word)
            except RuntimeError as problem:
                print(
                    f"shardwise: rank {self.rank} could not report why it ends ({_line(problem)}): {word.why}",
                    file=sys.stderr,
                )
        if self.keeper == self.rank:
            self._wait_until_heard()
        self.is_told = True  # last: should the store hang, the watchdog still ends this process

    def leave(self, patience_s: float) -> None:
        """Leaves the message that this rank is done, and waits until every rank is.

        Raises:
            RankError: a peer failed or was lost meanwhile, or did not come within ``patience_s`` seconds.
        """
        self.check()
        self.waits = Wait(_LEAVING, self.watchdog.awake_s)
        self._say_left()
        self._wait_for_all("left", self.size, patience_s)
        # The store's keeper leaves last: the others have then read the number they waited for.
        with contextlib.suppress(RuntimeError):
            self._main_store.add("gone", 1)
            if self.keeper == self.rank:
                self._wait_for_all("gone", self.size, min(patience_s, _SILENT_S))

    def leave_unannounced(self) -> None:
        """For a program that ends without closing its world: leaves a message, never raises. The store's keeper stays
        while others are alive and need it."""
        self.is_told = True
        if self.alarm is not None:
            return
        with contextlib.suppress(RuntimeError):
            self._say_left()
            beats, still = None, 0.0
            while self.keeper == self.rank and self._main_store.add("left", 0) < self.size:
                now = self.beats.read()
                beats, still = now, (still + 0.1 if now == beats else 0.0)
                if read_word(self._main_store) is not None or still > min(_SILENT_S, self.timeout_s / 4):
                    return
                time.sleep(0.1)

    def stop(self) -> None:
        """Ends the threads. A thread that asks the store while the interpreter ends aborts the process ("terminate
        called without an active exception")."""
        self.stopped.set()
        self.is_told, self.waits = True, None
        self.connections.close()
        for thread in (self._thread, self.watchdog):
            thread.join(_STOP_S)  # a thread that waits for an unresponsive store is left behind: it is a daemon

    # ---- words -----------------------------------------------------------------------------------------------

    def _say_left(self) -> None:
        self.connections.say(LEFT)
        self.place, self._left = "at the end: it has left", True
        self._beat(self._main_store)
        self._main_store.add("left", 1)

    def _wait_for_all(self, key: str, wanted: int, patience_s: float) -> None:
        start, pause = time.monotonic(), 1e-3
        while self._main_store.add(key, 0) < wanted:
            self.check()
            if time.monotonic() - start > patience_s:
                ranks, where = self.missing(_LEAVING)
                raise RankError(
                    f"rank {self.rank} waited {patience_s:.0f} s for the others to leave",
                    why=where,
                    fix="close the world on every rank, after the same number of windows",
                    ranks=ranks,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _wait_until_heard(self) -> None:
        end, ended = time.monotonic() + _HEARD_S, self.connections.ended()
        with contextlib.suppress(RuntimeError):
            while self._main_store.add("heard", 0) < self.size - 1 - len(ended) and time.monotonic() < end:
                time.sleep(0.02)

    def _beat(self, store: dist.Store) -> None:
        wait = self.waits or self.watchdog.blocked
        count = HAS_LEFT if self._left else self.turns
        beat = Beat(
            count, self.place, self.watchdog.main.line(), wait.what if wait else "", self.exchanges, self._process
        )
        leave_beat(store, self.rank, beat)

    def _missing(self, what: str, silent_s: float | None) -> tuple[tuple[int, ...], str]:
        beats, limit = self.beats.read(), self.report_s / 2 if silent_s is None else silent_s
        silent = {rank: seconds for rank in beats if (seconds := self.beats.silent_for(rank)) > limit}
        unseen = tuple(rank for rank in range(self.size) if rank != self.rank and rank not in beats)
        return missing(what, beats, silent, unseen=unseen, behind=self._behind)

    # ---- the thread that talks to the store ------------------------------------------------------------------

    def _talk(self) -> None:
        neighbour, looked_at = (self.rank + 1) % self.size, None
        while not self.stopped.wait(self.interval_s) and self.is_current():
            try:
                self._beat(self._store)
                word = read_word(self._store)
                if word is not None:
                    self._store.add("heard", 1)
                elif self.left_since is None and self._store.add("left", 0) > self._left:
                    self.left_since = time.monotonic()
                wait, now = self.waits or self.watchdog.blocked, self.watchdog.awake_s
                is_long = wait is not None and wait != looked_at and now - wait.since > 2 * self.interval_s
                self.beats.read(None if is_long else [neighbour])  # to compare their counts with later ones
                looked_at = wait if is_long else looked_at
                self.turns += 1
                if word is not None:
                    self.on_alarm(word)
                    return
                if wait is not None and self.waits is None and now - wait.since > _CROSSED_S:
                    self._look_for_crossed(wait)
                if wait is not None and wait.what != self.LOST and self.report.is_due(wait, now):
                    self.report.say(wait, now, self._missing(wait.what, None)[1])
                if (busy := self.busy) is not None and self.report_of_busy.is_due(busy, now):
                    self.report_of_busy.say_busy(busy, now, self.watchdog.main.line())
            except RuntimeError as error:
                is_expected = self.keeper is None or self.left_since is not None
                self.on_alarm(self.store_lost(f"is gone ({_line(error)})"), fatal=not is_expected)
                return

    def _look_for_crossed(self, wait: Wait) -> None:
        crossed = self._crossed.get(wait.group)
        if crossed is None or not crossed.looks_at(wait):
            return
        found = crossed.found(wait, self.beats.read(crossed.ranks), self.exchanges)
        if not found:
            return
        where = "; ".join(f"rank {rank} {elsewhere(beat)}" for rank, beat in found.items())
        here = f"{self.place} ({line})" if (line := self.watchdog.main.line()) else self.place
        why = f"rank {self.rank} waits {wait.what} ({here}), and {where}: they run other forwards or backwards, or in another order"
        leave_word(self._store, Word(sorted({self.rank, *found}), why, is_crossed=True))

    def store_lost(self, what: str) -> Word:
        """The message about a store that does ``what``."""
        if self.keeper is None:
            return Word([], f"the store that the launcher keeps for the ranks {what}")
        return Word([self.keeper], f"the store kept by rank {self.keeper} {what}")

    def on_alarm(self, word: Word, *, fatal: bool = True) -> None:
        """Takes over a message; the first one counts. A fatal one ends a process whose main thread does not look."""
        if self.stopped.is_set() or not self.is_current():
            return
        self.watchdog.is_fatal = self.watchdog.is_fatal or fatal
        if self.alarm is not None:
            return
        who = f"rank {', '.join(map(str, word.ranks))}" if word.ranks else word.who
        given = f"{who} was lost while rank {self.rank} was {self.place}"
        if self.rank in word.ranks:  # this rank did not come where the others waited
            given = f"rank {self.rank} was reported lost by the others while it was {self.place}"
        if word.is_crossed:
            given = f"ranks {', '.join(map(str, word.ranks))} wait for each other in different collectives"
        self.is_asked = word.is_asked
        fix = _FIX_CROSSED if word.is_crossed else _FIX_LOST
        self.alarm = RankError(given, why=word.why, fix=fix, ranks=tuple(word.ranks))


def _line(error: BaseException) -> str:
    return first_line(error, "no message")[:120]
