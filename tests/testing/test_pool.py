"""The warm pool: results, isolation between runs, and ranks that fail, die, hang or are left waiting."""

import os
import random
import select
import signal
import time
from dataclasses import dataclass

import pytest

from shardwise.errors import LayoutError, RankError, UsageError
from shardwise.launch.starting import ForkServer
from shardwise.testing import RankPool


@dataclass
class Point:
    x: int


def os_getpid():
    return os.getpid()


def leave_threads(number):
    import threading

    for _ in range(number):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return os.getpid()


def environment(*names):
    return [os.environ.get(name) for name in names]


def add(a, b=0):
    return a + b


def move(point):
    return Point(point.x + int(os.environ["RANK"]))


def reduce_over_ranks(value):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.full((2,), float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor


def make_a_mess():
    import warnings

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["OMP_NUM_THREADS"] = "7"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    warnings.simplefilter("error")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def look_around():
    import warnings

    import torch
    import torch.distributed as dist

    return {
        "group": dist.is_initialized(),
        "env": environment("LEFT_BEHIND", "OMP_NUM_THREADS"),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "filters": any(entry[0] == "error" for entry in warnings.filters),
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "pid": os.getpid(),
    }


def draw():
    import torch

    return random.random(), float(torch.rand(()))


def fail_on(rank, error="boom"):
    if int(os.environ["RANK"]) == rank:
        raise ValueError(error)
    return "fine"


def fail_everywhere():
    raise ValueError(f"boom on {os.environ['RANK']}")


def fail_while_peer_reduces():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))


def lose_a_peer():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(0.2)
        raise ValueError("the cause, reported after its echo")
    dist.all_reduce(torch.ones(1))


def fail_with_layout():
    raise LayoutError("dp_shard=3 on 4 ranks", why="it does not divide", fix="use dp_shard=4")


def kill_self(rank, number):
    if int(os.environ["RANK"]) == rank:
        print("last words")
        os.kill(os.getpid(), number)
    time.sleep(30)


def hang(rank):
    if int(os.environ["RANK"]) == rank:
        while True:
            time.sleep(0.05)
    return "done"


def fork_a_child_and_die(path):
    import subprocess

    child = subprocess.Popen(["sleep", "60"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code):
    raise SystemExit(code)


def speak():
    print(f"hello from {os.environ['RANK']}")


def not_picklable():
    return lambda: None


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


def test_a_rank_with_many_threads_left_behind_is_replaced(ranks):
    before = ranks.run(leave_threads, 2, 90)
    fresh = ranks.run(leave_threads, 2, 10)
    assert not set(before) & set(fresh)
    assert ranks.run(os_getpid, 2) == fresh


def test_a_process_keeps_its_rank(ranks):
    four = ranks.run(os_getpid, 4)
    assert ranks.run(leave_threads, 2, 90) == four[:2]
    assert ranks.run(os_getpid, 4)[2:] == four[2:]


def test_results_come_in_rank_order_with_arguments(ranks):
    assert ranks.run(add, 2, 3, b=4) == [7, 7]
    assert ranks.run(environment, 3, "RANK", "LOCAL_RANK") == [["0", "0"], ["1", "1"], ["2", "2"]]
    assert ranks.run(environment, 2, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR") == [["2", "2", "127.0.0.1"]] * 2


def test_classes_of_the_test_module_travel_both_ways(ranks):
    assert ranks.run(move, 2, Point(5)) == [Point(5), Point(6)]


def test_gloo_group_over_the_given_port(ranks):
    for size in (1, 2, 4):
        results = ranks.run(reduce_over_ranks, size, 1)
        expected = float(sum(1 + rank for rank in range(size)))
        assert [tensor.tolist() for tensor in results] == [[expected] * 2] * size


def test_same_seeds_in_every_run(ranks):
    first, second = ranks.run(draw, 2), ranks.run(draw, 2)
    assert first == second
    assert first[0] == first[1]


def test_what_a_run_leaves_behind_is_cleaned(ranks):
    before = ranks.run(look_around, 2)
    pids = ranks.run(make_a_mess, 2)
    after = ranks.run(look_around, 2)
    assert after == before
    # Cleaned, not replaced: the same processes.
    assert [state["pid"] for state in after] == pids
    assert not after[0]["group"]
    assert after[0]["dtype"] == "torch.float32"
    assert after[0]["grad"]
    assert after[0]["threads"] == 1


def test_failing_rank_is_named_with_its_traceback(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(fail_on, 2, 1)
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "rank 1 raised ValueError: boom" in str(caught.value)
    assert "in fail_on\n    raise ValueError(error)" in str(caught.value)
    assert ranks.run(add, 2, 1) == [1, 1]


def test_failure_on_all_ranks_shows_one_traceback(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(fail_everywhere, 3)
    assert str(caught.value).count("Traceback") == 1
    assert "then also failed: rank" in str(caught.value)


def test_peers_stuck_in_a_collective_are_replaced_and_the_cause_is_named(ranks):
    stuck = ranks.run(os_getpid, 2)[0]
    with pytest.raises(RankError, match="the cause") as caught:
        ranks.run(fail_while_peer_reduces, 2, timeout_s=60)
    assert caught.value.ranks == (1,)
    assert gone_within([stuck], 5) == []
    assert [t.tolist() for t in ranks.run(reduce_over_ranks, 2, 1)] == [[3.0, 3.0]] * 2


def test_cause_is_named_even_if_its_echo_arrives_first(ranks):
    with pytest.raises(RankError, match="the cause, reported after its echo") as caught:
        ranks.run(lose_a_peer, 2)
    assert caught.value.ranks == (1,)


def test_error_of_ours_keeps_its_type_as_the_cause(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(fail_with_layout, 1)
    assert isinstance(caught.value.__cause__, LayoutError)
    assert caught.value.fix == "use dp_shard=4"


def test_killed_rank_is_named_and_replaced(ranks):
    before = ranks.run(os_getpid, 2)
    with pytest.raises(RankError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)") as caught:
        ranks.run(kill_self, 2, 1, int(signal.SIGKILL))
    assert caught.value.ranks == (1,)
    assert "last words" in str(caught.value)
    after = ranks.run(os_getpid, 2)
    assert not set(before) & set(after)
    assert gone_within(before, 5) == []


def test_aborted_rank_points_at_collectives(ranks):
    with pytest.raises(RankError, match="disagreed about the size or order of a collective"):
        ranks.run(kill_self, 2, 0, int(signal.SIGABRT))


def test_rank_killed_between_runs_is_replaced(ranks):
    before = ranks.run(os_getpid, 2)
    ended = os.pidfd_open(before[1])
    os.kill(before[1], signal.SIGKILL)
    assert select.select([ended], [], [], 5)[0]  # with all of its threads, some time after the signal
    os.close(ended)
    after = ranks.run(os_getpid, 2)
    assert before[0] in after
    assert before[1] not in after


def test_hung_rank_is_named_with_its_stack_and_replaced(ranks):
    before = ranks.run(os_getpid, 2)
    with pytest.raises(RankError, match=r"rank 0 did not finish within 0\.5 s") as caught:
        ranks.run(hang, 2, 0, timeout_s=0.5)
    assert caught.value.ranks == (0,)
    assert "in hang" in str(caught.value)
    after = ranks.run(os_getpid, 2)
    assert before[0] not in after
    assert before[1] in after


def test_children_of_a_dead_rank_end_with_it(ranks, tmp_path):
    with pytest.raises(RankError, match="SIGKILL"):
        ranks.run(fork_a_child_and_die, 1, str(tmp_path / "pid"))
    assert gone_within([int((tmp_path / "pid").read_text())], 5) == []


def test_system_exit_is_a_failure_not_the_end_of_the_rank(ranks):
    before = ranks.run(os_getpid, 1)
    with pytest.raises(RankError, match="raised SystemExit: 3"):
        ranks.run(leave, 1, 3)
    assert ranks.run(os_getpid, 1) == before


def test_output_is_passed_on_with_the_rank(ranks, capsys):
    ranks.run(speak, 2)
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"
    ranks.run(add, 2, 1)
    assert capsys.readouterr().out == ""


def test_result_that_cannot_be_pickled_is_named(ranks):
    with pytest.raises(RankError, match="pickle"):
        ranks.run(not_picklable, 1)


def test_functions_without_a_name_are_refused(ranks):
    with pytest.raises(UsageError, match="no name a rank could find"):
        ranks.run(lambda: 1, 1)
    with pytest.raises(UsageError, match="at least one rank"):
        ranks.run(add, 0, 1)


def test_changed_file_is_loaded_again(ranks, tmp_path, monkeypatch):
    import importlib

    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "pool_edited_module.py"
    source.write_text("def value():\n    return 1\n")
    module = importlib.import_module("pool_edited_module")
    assert ranks.run(module.value, 1) == [1]
    source.write_text("def value():\n    return 'two'\n")
    assert ranks.run(module.value, 1) == ["two"]


def test_close_leaves_no_process_and_no_file_descriptor():
    before = sorted(os.listdir("/proc/self/fd"))
    with RankPool(preload=("torch",)) as pool:
        assert pool.run(add, 2, 1) == [1, 1]
        pids = [*pool.pids, pool._helper.pid]
    assert gone_within(pids, 5) == []
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture(scope="module")
def own_pool():
    """A pool that is spoiled: its helper process starts anew, which the session's takes longer for."""
    with RankPool(preload=("torch",)) as pool:
        yield pool


@pytest.mark.quick("True")
@pytest.mark.parametrize("with_answer", [True, False])
def test_an_interrupt_while_a_rank_is_forked_leaves_no_rank_under_the_id_of_another(own_pool, monkeypatch, with_answer):
    """The answer that was left unread was taken for the next request's: from then on each rank was known by the process id of the one before, and
    one that hung was neither killed nor shown with its stack."""
    real = ForkServer._answer

    def interrupted(server):
        monkeypatch.setattr(ForkServer, "_answer", real)
        if with_answer:
            assert server._connection.poll(20)
        raise KeyboardInterrupt

    pool, size = own_pool, max(2, len(own_pool.pids))
    assert pool.run(os_getpid, size) == list(pool.pids)
    before = pool.pids
    os.kill(before[1], signal.SIGKILL)
    assert gone_within(before[1:2], 10) == []  # else the pool still takes it for alive, and reports its end
    monkeypatch.setattr(ForkServer, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(os_getpid, size)
    for _ in range(2):
        assert pool.run(os_getpid, size + 1) == list(pool.pids)
    assert gone_within(before, 10) == []
