"""Ranks that fail, die, stop or leave: the others end in seconds and name them, with a launcher and without."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from world import endings

from shardwise.errors import RankError
from shardwise.launch import launch_local
from shardwise.world import EXIT_PEER_LOST

HERE = Path(__file__).parent
LIMIT_S = 60.0

# A rank that fails while an all-reduce is under way prints its error and ends with 1; torch's own teardown may then abort on the
# connection that broke. The error is what is asserted.
FAILED = {1, -6}
# Where the machine is busy, a peer that is still blocked when its watch has waited its grace is ended by it, with the same words.
LOST = {*FAILED, EXIT_PEER_LOST}


def _line(process):
    ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    assert ready, "the ranks' parent does not answer"
    return process.stdout.readline()


@pytest.fixture(scope="module")
def ended():
    """A function from the name of a scenario to ``(exit codes, what each rank wrote)``."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "endings.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )

    def run(name):
        process.stdin.write(name + "\n")
        process.stdin.flush()
        answer = json.loads(_line(process))
        return answer["codes"], answer["texts"]

    yield run
    process.stdin.close()
    process.wait(timeout=LIMIT_S)
    process.stdout.close()


@pytest.mark.parametrize("name", [pytest.param("out_of_memory", marks=pytest.mark.soak), "out_of_memory_in_with"])
def test_out_of_memory_on_one_rank_ends_all(ended, name):
    codes, (other, own) = ended(name)
    assert codes[0] in LOST and codes[1] in FAILED
    assert "out of memory" in own and "Traceback" in own
    assert re.search(r"rank 1 was lost while rank 0 was (at|after) window", other)
    assert re.search(r"why: rank 1 failed after window \d, before .*out of memory", other)


@pytest.mark.soak
def test_the_word_of_the_stores_keeper_is_heard_before_it_ends(ended):
    codes, (own, other) = ended("out_of_memory_on_the_keeper")
    assert codes[0] in FAILED and codes[1] in LOST
    assert "RuntimeError: out of memory" in own
    assert "why: rank 0 failed after window 1" in other and "RuntimeError: out of memory" in other


def test_a_killed_rank_is_named(ended):
    codes, (other, _) = ended("killed")
    assert codes[0] in FAILED and codes[1] == -signal.SIGKILL
    assert "rank 1 was lost" in other and "the process of rank 1 has ended" in other and "cannot connect" not in other


def test_a_killed_keeper_of_the_store_is_named(ended):
    codes, (_, other) = ended("killed_keeper")
    assert codes[0] == -signal.SIGKILL and codes[1] in LOST
    assert "RankError: rank 0 was lost" in other


def test_a_rank_that_exits_without_a_word_is_named_though_its_status_is_0(ended):
    codes, (other, _) = ended("exits")
    assert codes[0] in LOST and codes[1] == 0
    assert "RankError: rank 1 was lost" in other and "the process of rank 1 has ended" in other


def test_a_killed_rank_is_named_while_a_child_of_it_lives(ended):
    codes, (other, _) = ended("killed_beside_a_child")
    assert codes[0] in LOST
    assert "RankError: rank 1 was lost" in other and "the process of rank 1 has ended" in other


@pytest.mark.soak
def test_a_killed_rank_is_named_by_its_silence_where_ranks_cannot_connect(ended):
    codes, (other, own) = ended("killed_without_connections")
    assert codes[0] in LOST
    assert (other + own).count("cannot connect to rank") == 1 and "the firewall says no" in other + own
    assert re.search(
        r"RankError: rank 0 waited in vain for rank 1[^\n]*\n[^\n]*rank 1 has given no sign of life", other
    )


def test_sigterm_after_a_loss_ends_a_blocked_rank_at_once_with_the_message(ended):
    codes, (other, _) = ended("sigterm_after_a_loss")
    assert codes == [EXIT_PEER_LOST, -signal.SIGKILL]
    assert other.count("RankError: rank 1 was lost") == 1 and "the process of rank 1 has ended" in other


@pytest.mark.parametrize("name", ["sigterm_while_all_is_well", pytest.param("sigterm_to_all", marks=pytest.mark.soak)])
def test_sigterm_ends_a_blocked_rank_as_it_would_without_us(ended, name):
    codes, (own, other) = ended(name)
    assert codes[0] == -signal.SIGTERM and "RankError" not in own
    assert name != "sigterm_to_all" or "RankError" not in other


@pytest.mark.soak
def test_a_rank_that_goes_on_after_its_own_exception_is_waited_for_by_name(ended):
    codes, (other, _) = ended("caught")
    assert codes == [0, 0]
    assert re.search(
        r"rank 0 has waited 3 s at window 2, before forward: rank 1 is after .*endings.py:\d+ in caught", other
    )
    assert other.count("rank 0 has waited") == 1  # and again only when it is four times as long


@pytest.mark.soak
def test_a_lock_that_is_held_is_reported_and_is_no_alarm(ended):
    codes, (other, _) = ended("lock_held")
    assert codes == [0, 0]
    assert "rank 1 has given no sign of life" in other and "RankError" not in other


def test_a_stopped_rank_is_reported_and_named_at_the_timeout_though_its_peer_is_blocked(ended):
    codes, (other, _) = ended("stopped")
    assert codes[0] in LOST and codes[1] is None
    assert re.search(r"rank 0 has waited \d s in all_reduce: rank 1 has given no sign of life for \d s", other)
    assert "it waits until the timeout of 5 s" in other
    assert re.search(
        r"RankError: rank 0 waited in vain for rank 1[^\n]*\n[^\n]*rank 1 has given no sign of life", other
    )


@pytest.mark.soak
def test_a_stopped_keeper_of_the_store_is_named(ended):
    codes, (_, other) = ended("stopped_keeper")
    assert codes[0] is None and codes[1] in (1, EXIT_PEER_LOST)
    assert re.search(r"rank 1 has waited \d s at a barrier: the store kept by rank 0 has not answered for \d s", other)
    assert re.search(r"RankError: rank \d[^\n]*\n[^\n]*the store kept by rank 0 has not answered", other)


_PLACES = ("bare dp_shard=2 backward",)  # the others in soak


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _PLACES else pytest.mark.soak) for name in endings.BARE]
)
def test_a_rank_that_fails_in_a_loop_of_ones_own_is_named(ended, name):
    codes, (other, own) = ended(name)
    assert codes[0] in LOST and codes[1] in FAILED
    assert "ValueError: a label out of range" in own and "RankError" not in own
    assert re.search(r"RankError: rank 1 was lost while rank 0 was (at|after) the last micro-batch", other)
    assert re.search(r"why: rank 1 failed after the last micro-batch.*: ValueError: a label out of range", other)


@pytest.mark.parametrize(
    ("name", "who"), [pytest.param("left_by_exit", 1, marks=pytest.mark.soak), ("left_by_exit_keeper", 0)]
)
def test_a_rank_whose_program_ended_is_named(ended, name, who):
    codes, texts = ended(name)
    assert codes[who] == 0 and codes[1 - who] in FAILED
    assert f"rank {who} left while rank {1 - who} waited at a barrier" in texts[1 - who]


def test_the_threads_of_a_world_that_is_never_closed_end_before_the_interpreter(ended):
    codes, texts = ended("never_closed_and_looked_at")
    assert codes == [0, 0] and list(map(_own_lines, texts)) == [["[]"], ["[]"]]


def test_the_threads_of_a_world_end_before_the_interpreter_after_an_error(ended):
    codes, texts = ended("fails_and_looked_at")
    assert codes == [1, 1], texts
    assert [_own_lines(text)[-1] for text in texts] == ["[]", "[]"]


def test_a_program_that_never_closes_its_world_ends_in_order(ended):
    codes, texts = ended("never_closed")
    assert codes == [0, 0]
    assert list(map(_own_lines, texts)) == [["done"], ["done"]]


def _own_lines(text):
    """Without what torch says as it connects, where the system has no name for this machine's address."""
    return [line for line in text.splitlines() if "hostname of the client socket" not in line]


def test_fewer_windows_on_one_rank_are_named(ended):
    codes, (other, own) = ended("fewer_windows")
    assert set(codes) <= set(FAILED)
    assert "rank 1 left while rank 0 waited at window 2, before forward" in other
    assert "rank 0 failed at window 2" in own or "rank 1 left" in own


@pytest.mark.quick("error_of_all_in_with")
@pytest.mark.parametrize("name", ["error_of_all", "error_of_all_in_with"])
def test_an_error_of_every_rank_is_shown_once_with_the_lines_of_the_script(ended, name):
    """As torchrun shows it: test_uncaught.py."""
    codes, texts = ended(name)
    assert codes == [1, 1]
    told = [line for text in texts for line in text.splitlines() if line.startswith("[rank")]
    assert sum("why: the micro-batch twice over" in line for line in told) == 1, texts
    assert sum("a loss that takes a mean (shown by rank" in line for line in told) == 1, texts
    assert any("step([{" in line for line in told) and not any("shardwise/" in line for line in told), texts


# ---- with a launcher ----------------------------------------------------------------------------------------------


def blocked_beside_a_stopped_rank():
    import torch
    import torch.distributed as dist

    import shardwise as sw

    with sw.init("dp_shard=2", device="cpu", timeout_s=5) as world:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))


@pytest.mark.soak
def test_the_local_launcher_names_the_stopped_rank():
    with pytest.raises(RankError) as caught:
        launch_local(
            f"{__file__}:blocked_beside_a_stopped_rank", nproc=2, stopped_s=300.0, timeout_s=LIMIT_S, grace_s=0.5
        )
    assert caught.value.ranks == (1,)
    # By its state, which the system shows here, or by its silence.
    assert any(words in str(caught.value) for words in ("rank 1 is stopped", "rank 1 has given no sign of life"))


def test_the_pool_names_the_stopped_rank_and_replaces_both(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(blocked_beside_a_stopped_rank, 2, timeout_s=30)
    assert "rank 1 has given no sign of life" in str(caught.value)
    assert caught.value.__cause__.ranks == (1,)
    assert len(ranks.run(_pid, 2)) == 2


def _fails_in_a_loop_of_its_own():
    import shardwise as sw

    endings.RANK = int(os.environ["RANK"])
    endings._bare_loop(sw.init("dp_shard=2", device="cpu", timeout_s=60), "forward")


def test_the_pool_names_a_rank_that_fails_in_a_loop_of_ones_own(ranks):
    with pytest.raises(RankError, match="rank 1 raised ValueError: a label out of range") as caught:
        ranks.run(_fails_in_a_loop_of_its_own, 2, timeout_s=40)
    assert caught.value.ranks == (1,)


def _pid():
    return os.getpid()


def _read_until(process, words, limit_s=LIMIT_S):
    """What the process writes until all ``words`` are in it."""
    text, end = "", time.monotonic() + limit_s
    while not all(word in text for word in words) and time.monotonic() < end:
        if select.select([process.stdout], [], [], 0.2)[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16).decode("utf-8", "replace")
            if not chunk:
                break
            text += chunk
    return text


@pytest.mark.soak
def test_torchrun_trains_reopens_its_world_and_names_a_stopped_rank(tmp_path):
    """One run of the real launcher for all three, because it takes seconds to start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(HERE / "torchrun_script.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip
    try:
        text = _read_until(process, ["has given no sign of life"])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in (int(path.read_text()) for path in tmp_path.glob("*.pid")):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait(timeout=LIMIT_S)
        process.stdout.close()
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [entry["source"] for entry in found] == ["torchrun", "torchrun"], text[-3000:]
    assert [entry["place"] for entry in found] == [[0, 0, 2], [1, 1, 2]]
    assert found[0]["losses"] == found[1]["losses"] and len(found[0]["losses"]) == 3
    assert found[0]["gathered"] == [[[turn, 0], [turn, 1]] for turn in range(2)]
    assert "in all_reduce: rank 1 has given no sign of life" in text
