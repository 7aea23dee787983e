"""A rank that is asked to end, with a collective that broke, no connections, and nothing said by anyone: silence tells whom it lost."""

import threading
from types import SimpleNamespace

import pytest

from shardwise.world import watchdog
from shardwise.world.beats import Word
from shardwise.world.liveness import Watch
from shardwise.world.watchdog import Watchdog


class _Watch(SimpleNamespace):
    """Of rank 0 among 2, as far as it is asked; references to it may be weak."""

    LOST = Watch.LOST
    on_alarm, wait_for_alarm = Watch.on_alarm, Watch.wait_for_alarm

    def missing(self, what, *, silent_s=None):
        return self.found.pop(0) if self.found else ((), "all the others wait there too")


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(watchdog, "_SILENCE_S", 0.3)
    monkeypatch.setattr(watchdog, "_LOOKS_S", 0.6)
    monkeypatch.setattr(watchdog, "within", lambda seconds, function: None)
    connections = SimpleNamespace(closed=set(), ended=set, is_complete=False)
    found = _Watch(
        rank=0, keeper=None, alarm=None, turns=0, waits=None, place="at window 3", left_since=None, is_told=False
    )
    found.is_broken, found.is_asked, found.stopped, found.is_current = True, False, threading.Event(), lambda: True
    found.connections, found.report_s, found.timeout_s, found.found = connections, 1e3, 1e3, []
    found.watchdog = Watchdog(found, threading.main_thread(), found.stopped)
    found.watchdog.start()
    yield found
    found.stopped.set()
    found.watchdog.join(5.0)


def test_a_store_that_does_not_answer_in_time_is_asked_again(watch):
    late = Word([], "the store that the launcher keeps for the ranks has not answered for 2 s")
    watch.found = [((), ""), (tuple(late.ranks), late.why), ((1,), "rank 1 has given no sign of life for 3 s")]
    lost = watch.watchdog.loss()
    assert lost.ranks == (1,) and "rank 1 has given no sign of life for 3 s" in str(lost)


def test_a_peer_of_which_nothing_is_known_is_not_called_the_launcher(watch):
    lost = watch.watchdog.loss()
    assert lost.ranks == () and str(lost).startswith("a peer was lost while rank 0 was at window 3"), lost
