"""Connections between neighbours, without ranks: two ends in one process, over a store in its memory."""

import json
import os
import socket
import threading
import time

import pytest
import torch.distributed as dist

from shardwise.world import connections
from shardwise.world.beats import HAS_LEFT, Beat
from shardwise.world.connections import CLOSED, LEFT, TERMINATED, PeerConnections
from shardwise.world.crossed import Crossed
from shardwise.world.waiting import MainThread, Wait, WaitReport, missing


class _Ends:
    """Both ends, and what they are told."""

    def __init__(self, size=2):
        self.store = dist.HashStore()
        self.ended, self.problems, self.is_current = [], [], True
        self.ends = [self.end(rank, size) for rank in range(size)]

    def end(self, rank, size=2):
        return PeerConnections(
            rank, size, store=lambda: self.store, master="127.0.0.1", is_one_host=True, is_current=lambda: self.is_current,
            on_end=lambda peer, how: self.ended.append((rank, peer, how)), on_problem=lambda *told: self.problems.append(told),
        )  # fmt: skip

    def wait_until(self, is_so):
        end = time.monotonic() + 20
        while not is_so() and time.monotonic() < end:
            time.sleep(0.01)
        assert is_so()

    def connected(self):
        self.wait_until(lambda: all(end.is_complete for end in self.ends))
        return self


@pytest.fixture
def ends():
    found = _Ends().connected()
    yield found
    for end in found.ends:
        end.close()


def test_an_end_without_a_word_is_told_and_one_with_it_is_not(ends):
    first, second = ends.ends
    second.close()
    first._thread.join(0.3)
    assert ends.ended == []


def test_a_process_that_ends_is_told_by_both_its_connections(ends):
    first, second = ends.ends
    for connection in list(second._peers):
        connection.shutdown(socket.SHUT_RDWR)  # as the system does when a process ends
    ends.wait_until(lambda: (0, 1, CLOSED) in ends.ended)
    assert first.ended() == {1}


def test_what_sigterm_ended_is_told_as_such(ends):
    first, second = ends.ends
    second.say(TERMINATED)
    for connection in list(second._peers):
        connection.shutdown(socket.SHUT_RDWR)
    ends.wait_until(lambda: (0, 1, TERMINATED) in ends.ended)
    assert first.ended() == set()


def test_a_ring_of_three_has_two_connections_each_and_no_door_is_left_open():
    found = _Ends(3).connected()
    found.wait_until(lambda: all(end._listener is None for end in found.ends))
    assert [sorted(peer.rank for peer in end._peers.values()) for end in found.ends] == [[1, 2], [0, 2], [0, 1]]
    for end in found.ends:
        end.close()
    assert found.ended == []


def test_closing_at_once_is_no_alarm_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(20):
        found = _Ends()
        if turn % 2:
            found.connected()
        for end in found.ends:
            end.close()
        assert found.ended == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_world_that_was_destroyed_without_a_word_is_left(ends):
    ends.is_current = False
    ends.wait_until(lambda: not any(end._thread.is_alive() for end in ends.ends))
    assert ends.ended == [] and not any(end._peers for end in ends.ends)


def test_a_stranger_at_the_door_is_sent_away():
    found = _Ends(1)  # waits for itself: connected once
    found.wait_until(lambda: found.store.check(["connect/0"]))
    end, place = found.end(1, 3), None
    found.wait_until(lambda: found.store.check(["connect/1"]))
    place = json.loads(found.store.get("connect/1"))
    with socket.create_connection((place["host"], place["port"]), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n....")
        assert stranger.recv(16) == b""
    assert not end._peers and found.ended == []
    for each in (end, *found.ends):
        each.close()


def test_what_cannot_be_reached_is_told_once():
    found = _Ends(1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        place = {"host": "127.0.0.1", "port": port, "machine": socket.gethostname(), "secrets": ["00" * 16] * 2}
        found.store.set("connect/2", json.dumps(place))
        end = found.end(1, 3)
        found.wait_until(lambda: found.problems)
    end.close()
    found.ends[0].close()
    ((problem, is_closed),) = found.problems
    assert f"127.0.0.1:{port}: " in problem and is_closed


def test_a_forked_process_keeps_none_of_them(ends):
    pid = os.fork()
    if pid == 0:
        is_free = not any(end._peers for end in connections._open)
        os._exit(0 if is_free else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ends.ended == [] and all(end.is_complete for end in ends.ends)


# ---- waiting ------------------------------------------------------------------------------------------------------


def test_who_is_missing_says_where_they_are():
    beats = {
        1: Beat(4, "after window 3", "train.py:7 in main"),
        2: Beat(9, "at window 4", "", "at window 4"),
        3: Beat(5, "after window 3"),
        4: Beat(-1, "at the end: it has left"),
    }
    ranks, text = missing("at window 4", beats, {3: 12.4}, unseen=(5,))
    assert ranks == (1, 3, 4, 5)
    assert "rank 1 is after window 3 (train.py:7 in main); rank 3 has given no sign of life for 12 s" in text
    assert "rank 4 has left; rank 5 has not begun" in text and "rank 2" not in text
    assert missing("at window 4", {2: beats[2]}, {}) == ((), "all the others wait there too")


def test_a_rank_that_is_silent_was_last_where_all_ranks_were():
    """A beat is written twice a second: quick steps leave it many windows behind."""
    beat = Beat(4, "after comparing the ranks' modules", "train.py:7 in main", "", 5, "4711 on node3")
    _, text = missing("at window 4", {1: beat}, {1: 9.2}, behind=(11, "window 3, before the step"))
    assert text.endswith("it was last after window 3, before the step (process 4711 on node3)")
    _, text = missing("at window 4", {1: beat}, {1: 9.2}, behind=(5, "comparing the ranks' modules"))
    assert text.endswith("it was last after comparing the ranks' modules (train.py:7 in main) (process 4711 on node3)")


def test_ranks_wait_for_each_other_only_if_all_say_so_anew():
    wait = Wait("in all_gather_single", 10.0, "units")

    def found(*beats, of=wait):
        crossed = Crossed((0, 2), "units")
        return [sorted(crossed.found(of, dict(zip((0, 2), each, strict=False)), 6)) for each in beats]

    def at(count, waits="at window 4", exchanges=7):
        return Beat(count, "at window 4", "train.py:7 in main", waits, exchanges)

    assert found([at(3)], [at(3)], [at(3)]) == [[], [], []], "the last word of a process that is stopped"
    assert found([at(3)], [at(4)], [at(5)]) == [[], [0], [0]]
    late = [at(count, exchanges=6) for count in (3, 4, 5)]
    assert found(*([beat] for beat in late)) == [[], [], []], "all ranks have come there, and it has not heard yet"
    assert found([at(3), at(7)], [at(4), at(7)], [at(5), at(8)]) == [[], [], [0, 2]]
    assert found([at(3)], [at(4, "")], [at(5)], [at(6)]) == [[], [], [], [0]], "it went on between"
    assert found([at(3, "in all_gather_single")], [at(4, "in all_gather_single")]) == [[], []]
    assert found([at(3, "in reduce_scatter_single")], [at(4, "in reduce_scatter_single")]) == [[], [0]]
    assert found([Beat(HAS_LEFT, "at the end")], [Beat(HAS_LEFT, "at the end")]) == [[0], [0]]
    crossed = Crossed((0, 2), "units")
    assert crossed.looks_at(wait)
    assert not crossed.looks_at(Wait("in all_reduce", 10.0, "mine")) and not crossed.looks_at(
        Wait("in all_reduce", 10.0)
    )


def test_a_report_comes_again_when_the_wait_is_four_times_as_long(capsys):
    report, wait = WaitReport(0, 9.0, 600.0), Wait("at a barrier", 10.0)
    due = []
    for now in range(10, 200):
        if report.is_due(wait, float(now)):
            due.append(now)
            report.say(wait, float(now), "rank 1 is elsewhere")
    assert due == [19, 46, 154]
    assert (
        "rank 0 has waited 9 s at a barrier: rank 1 is elsewhere; it waits until the timeout of 600 s"
        in capsys.readouterr().err
    )


def test_a_thread_that_works_is_not_blocked():
    main, found = MainThread(threading.main_thread()), []

    def look():
        for now in range(5):
            found.append((main.blocked(float(now)), main.line()))
            time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():
        sum(range(1000))
    assert all(wait is None and "test_connections.py" in line for wait, line in found)


def test_a_neighbour_that_is_still_saying_who_it_is_gets_the_secret_first_and_then_the_word():
    """It took the word for a wrong answer and hung up, and so was lost to a rank that had left."""
    found = _Ends(1)
    end = found.end(1, 3)
    found.wait_until(lambda: found.store.check(["connect/1"]))
    place = json.loads(found.store.get("connect/1"))
    hello, answer = (bytes.fromhex(text) for text in place["secrets"])
    with socket.create_connection((place["host"], place["port"]), timeout=5) as neighbour:
        neighbour.sendall(hello[:4])
        found.wait_until(lambda: any(peer.received for peer in end._peers.values()))
        end.say(LEFT)
        neighbour.sendall(hello[4:] + (0).to_bytes(4, "big"))
        told = b""
        while len(told) < len(answer) + 1:
            told += neighbour.recv(64)
    assert told == answer + LEFT
    found.wait_until(lambda: found.ended)  # before close(), which tells of no end any more
    for each in (*found.ends, end):
        each.close()
    assert found.ended == [(1, 0, CLOSED)]  # this neighbour said nothing
