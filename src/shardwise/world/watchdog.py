"""The thread that ends a process whose main thread is blocked in a collective after a peer was lost.

gloo cannot be aborted from outside. So, some seconds after an alarm that the main thread has not seen, the error is
reported to the process that started this one (or printed), and this process ends with :data:`EXIT_PEER_LOST`, as with
NCCL's own watchdog. The thread also keeps the clock by which waits are measured, checks whether the main thread is
blocked, and notices a store that does not answer: the process that keeps the store is stopped, and no read would
return.
"""

import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from shardwise.errors import RankError
from shardwise.launch.events import report_failure
from shardwise.world.beats import Word, read_word, within
from shardwise.world.waiting import MainThread, Wait

if TYPE_CHECKING:
    from shardwise.world.liveness import Watch

EXIT_PEER_LOST = 71  # os.EX_OSERR: this process ended itself because a peer was lost
_GRACE_S = 3.0  # time for the main thread to see an alarm by itself
_TICK_S = 0.1
_LONGEST_TICK_S = 1.0  # a longer tick means that this process was stopped, or its interpreter lock held
_SILENCE_S = 3.0  # time in which a living rank writes some beats, and a collective breaks if its peer has ended
_LOOKS_S = 6.0  # how long silence is looked for after that: on a busy machine the store may answer late
_WORD_S = 1.5  # time in which the store receives the message about a process that has ended


class Watchdog(threading.Thread):
    """The watchdog thread of one watch.

    Attributes:
        awake_s: the clock: seconds in which this process ran.
        stalled_s: seconds since the store last answered the watch.
        blocked: the collective that blocks the main thread.
        main: the main thread, as seen from others.
        is_fatal: the alarm ends the process if the main thread does not see it.
        is_shown: the alarm was shown to the user.
    """

    def __init__(self, watch: "Watch", main: threading.Thread, stop: threading.Event):
        super().__init__(name="shardwise-watchdog", daemon=True)
        self.awake_s, self.stalled_s = 0.0, 0.0
        self.blocked: Wait | None = None
        self.main = MainThread(main)
        self.is_fatal, self.is_shown = False, False
        self._rank = watch.rank
        self._watch = weakref.ref(watch)  # a cycle would keep connections open
        self._stop_event = stop

    def run(self) -> None:
        """Runs until the world or the process ends."""
        watch, last, turns = self._watch(), time.monotonic(), 0
        if watch is None:
            return
        since_ended, since_alarm = 0.0, 0.0
        while not self._stop_event.wait(_TICK_S) and watch.is_current():
            now = time.monotonic()
            tick, last = min(now - last, _LONGEST_TICK_S), now
            self.awake_s += tick
            self.blocked = self.main.blocked(self.awake_s)
            self.stalled_s, turns = 0.0 if turns != watch.turns else self.stalled_s + tick, watch.turns
            since_ended = since_ended + tick if watch.connections.closed else 0.0
            if watch.alarm is None:
                self._look_at_store(watch, since_ended)
            since_alarm = since_alarm + tick if watch.alarm is not None and not watch.is_told else 0.0
            if since_alarm > _GRACE_S and self.is_fatal and watch.alarm is not None:
                self.end(watch.alarm, 0.0)

    def _look_at_store(self, watch: "Watch", since_ended: float) -> None:
        wait = watch.waits or self.blocked
        if since_ended > _WORD_S:
            watch.on_alarm(ended_word(sorted(watch.connections.closed)))
        elif self.stalled_s > watch.timeout_s:
            watch.on_alarm(watch.store_lost(f"has not answered for {self.stalled_s:.0f} s"))
        elif self.stalled_s > watch.report_s and wait is not None and watch.report.is_due(wait, self.awake_s):
            word = watch.store_lost(f"has not answered for {self.stalled_s:.0f} s")
            watch.report.say(wait, self.awake_s, word.why)

    def loss(self) -> RankError | None:
        """The lost-peer error with which this process would end now; None: no peer is known to be lost."""
        watch = self._watch()
        if watch is None or self._stop_event.is_set() or not watch.is_current():
            return None
        if watch.alarm is None:
            word, ended = None, watch.connections.ended()
            if watch.keeper not in ended:
                word = within(0.5, lambda: read_word(watch.open_store()))
            if word is None and ended:
                word = ended_word(sorted(ended))
            if word is None and not watch.connections.is_complete:
                word = self._by_silence(watch)
            if word is None and watch.is_broken and watch.wait_for_alarm(1.0) is None:
                word = Word([], "a collective failed, and no rank has said why", who="a peer")
            if word is not None:
                watch.on_alarm(word)
        return None if watch.is_asked else watch.alarm

    def _by_silence(self, watch: "Watch") -> Word | None:
        """Finds a lost rank where ranks are not connected (in the first second of a run, behind a firewall): a
        collective that breaks shows that a peer is lost, and silence shows which."""
        watch.missing(watch.LOST)  # reads the counts of all beats, to compare them with those after the wait
        start = self.awake_s
        while watch.alarm is None and self.is_alive() and (waited := self.awake_s - start) < _SILENCE_S + _LOOKS_S:
            ended = watch.connections.ended()
            if ended:
                return ended_word(sorted(ended))
            if waited > _SILENCE_S:
                if not watch.is_broken:
                    return None
                ranks, where = watch.missing(watch.LOST, silent_s=_SILENCE_S - 1.0)
                if ranks:
                    return Word(list(ranks), where)
            time.sleep(0.02 if waited < _SILENCE_S else 0.2)
        return None

    def end(self, alarm: RankError, patience_s: float) -> None:
        """Ends this process after showing the alarm; a main thread that has it gets ``patience_s`` to end by itself."""
        watch = self._watch()
        if watch is None or not watch.is_told:
            self._show(alarm)
        time.sleep(patience_s)
        self._show(alarm)
        os._exit(EXIT_PEER_LOST)

    def _show(self, alarm: RankError) -> None:
        if self.is_shown:
            return
        self.is_shown = True
        if not report_failure(alarm):
            print(f"shardwise: rank {self._rank} ends itself.\nRankError: {alarm}", file=sys.stderr, flush=True)


def ended_word(ranks: list[int]) -> Word:
    """The message about ranks whose connection was closed without a byte."""
    who = f"rank {', '.join(map(str, ranks))}"
    return Word(ranks, f"the process of {who} has ended without notice: the system has closed its connections")
