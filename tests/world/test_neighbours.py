"""What a rank says that cannot connect to its neighbour: nothing, where the neighbour has failed or left."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardwise.world.beats import HAS_LEFT, Beat, Beats, Word, leave_beat, leave_word
from shardwise.world.neighbours import _Told


class _Watch(SimpleNamespace):
    """Of rank 1 among 2, as far as it is asked; references to it may be weak."""


@pytest.fixture
def watch():
    store = dist.HashStore()
    found = _Watch(rank=1, size=2, alarm=None, interval_s=0.5, stopped=threading.Event(), open_store=lambda: store)
    found.beats = Beats(store, 1, 2, lambda: 0.0)
    return found


def fails(watch):
    leave_word(watch.open_store(), Word([0], "rank 0 failed at start-up: KeyError: 'boom'"))


def leaves(watch):
    leave_beat(watch.open_store(), 0, Beat(HAS_LEFT, "at the end: it has left"))


@pytest.mark.parametrize(
    "happens", [fails, leaves, lambda watch: watch.stopped.set()], ids=["fails", "leaves", "stops"]
)
def test_a_peer_that_failed_or_left_is_not_taken_for_one_that_cannot_be_reached(watch, capfd, happens):
    later = threading.Timer(0.1, happens, (watch,))  # word of it comes after the door was found closed
    later.start()
    _Told(watch).of_a_problem("127.0.0.1:4711: [Errno 111] Connection refused", True)
    later.join()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("is_closed", "advice"), [(True, "look whether rank 0 has ended"), (False, "connect to each other on any port")]
)
def test_a_door_that_is_closed_on_this_host_is_no_firewall(watch, capfd, is_closed, advice):
    watch.interval_s = 0.0
    _Told(watch).of_a_problem("the reason", is_closed)
    said = capfd.readouterr().err
    assert "rank 1 cannot connect to rank 0 (the reason)" in said and advice in said
    assert ("on any port" in said) is not is_closed
