"""Launching ranks on one machine: results, environment, output, events, failures, ends, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, LayoutError, RankError, Stopped
from shardwise.launch import default_nproc, free_port, launch_local, send_event, supervisor
from shardwise.launch.failure import Failure, failure_of, root_cause

TARGETS = str(Path(__file__).with_name("launch_targets.py"))
SOURCE = str(Path(__file__).resolve().parents[2] / "src")


# As interpreters of their own, and forked from one that has imported this: whatever is promised of ranks holds for both.
WAYS = {"interpreters": (), "forked": ("json.tool",)}


@pytest.fixture(params=list(WAYS), autouse=True)
def preload(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PRELOAD", WAYS[request.param])
    return WAYS[request.param]


PRELOAD: tuple[str, ...] = ()


def launch(function, *args, nproc=2, **options):
    return launch_local(f"{TARGETS}:{function}", nproc=nproc, args=args, **{"preload": PRELOAD, **options})


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def noted(directory, count, seconds=20):
    """The process ids that ``count`` processes wrote as file names into ``directory``."""
    deadline = time.monotonic() + seconds
    while len(names := os.listdir(directory)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(names) >= count
    return [int(name.rpartition(".")[2]) for name in names]


def still_alive(pids, seconds=8):
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


@pytest.fixture
def parent(tmp_path):
    """Starts a program that launches ranks with a child each; gives the process and the ids of all it started."""
    started = []

    def start(
        grace_s=2.0, function="sleep_with_child", count=4, notice_s=None, passes_on=(), preload=PRELOAD, around="pass"
    ):
        signals = tuple(map(int, passes_on))
        options = f"grace_s={grace_s}, notice_s={notice_s}, passes_on={signals}, preload={preload}"
        code = (
            "import os\n"
            "from shardwise.launch import launch_local, passed_over\n"
            f"with passed_over({signals}):\n"
            "    try:\n"
            f"        {around}\n"
            f"        launch_local({TARGETS + ':' + function!r}, nproc=2, args=({str(tmp_path)!r},), {options})\n"
            "    finally:\n"
            f"        {around}\n"
        )
        env = {**os.environ, "PYTHONPATH": SOURCE}
        process = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process, noted(tmp_path, count)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def test_results_come_in_rank_order():
    assert launch("add", 1, 2) == [3, 4]
    assert launch("add", 1, 2, nproc=1) == [3]


def test_target_can_be_a_module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(TARGETS).parent))
    assert launch_local("launch_targets:add", nproc=2, args=(1, 2), preload=PRELOAD) == [3, 4]


def test_ranks_have_the_environment_torchrun_gives(monkeypatch):
    ours = ("OMP_NUM_THREADS", "SHARDWISE_SET_OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
    for name in ours:
        monkeypatch.delenv(name, raising=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", *ours, "MINE")
    first, second = launch("environment", *names, env={"MINE": "yes"})
    assert first == ["0", "2", "0", "2", "127.0.0.1", "1", "1", "ERROR", "yes"]
    assert second == ["1", "2", "1", "2", "127.0.0.1", "1", "1", "ERROR", "yes"]


def test_variables_the_user_set_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    names = ("OMP_NUM_THREADS", "SHARDWISE_SET_OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "MASTER_PORT", "PYTHONPATH")
    assert launch("environment", *names, env={"MASTER_PORT": "29501"}) == [["3", None, "INFO", "29501", "/nowhere"]] * 2


def test_ranks_meet_at_the_port_the_parent_holds():
    assert launch("store_is_reachable") == [True, True]


def test_output_goes_line_by_line_with_its_rank(capfd):
    launch("write")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(f"[rank {r}] {t}" for r in (0, 1) for t in ("to stdout", "no newline"))
    assert sorted(err.splitlines()) == ["[rank 0] to stderr", "[rank 1] to stderr"]


def test_on_line_replaces_the_printing(capfd):
    lines = []
    launch("write", on_line=lambda *line: lines.append(line))
    assert sorted(lines) == sorted(
        (rank, *line)
        for rank in (0, 1)
        for line in (("stdout", "to stdout"), ("stdout", "no newline"), ("stderr", "to stderr"))
    )
    assert capfd.readouterr() == ("", "")


def test_events_arrive_whole_and_in_order_for_each_rank():
    got = []
    assert launch("events", 30, on_event=lambda rank, event: got.append((rank, event))) == [[True] * 30] * 2
    for rank in (0, 1):
        assert [event["step"] for r, event in got if r == rank] == list(range(30))
    assert all(len(event["text"]) == 10000 for _, event in got)


def test_events_nobody_asked_for_do_not_block_a_rank():
    assert launch("events", 30) == [[True] * 30] * 2


def test_event_that_is_not_json_is_refused_on_the_rank_and_without_a_launcher():
    with pytest.raises(RankError, match="not JSON serializable"):
        launch("bad_event")
    with pytest.raises(TypeError, match="not JSON serializable"):
        send_event({"value": object()})


def test_send_event_without_a_launcher_says_so():
    assert send_event({"step": 1}) is False


def test_exception_on_one_rank_names_it_and_ends_the_others():
    with pytest.raises(RankError, match="rank 1 raised ValueError: boom") as caught:
        launch("fail_on", 1)
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value).count("Traceback") == 1
    assert 'raise ValueError("boom")' in str(caught.value)
    assert "child.py" not in str(caught.value)


def test_exception_on_all_ranks_shows_one_traceback(capfd, tmp_path):
    with pytest.raises(RankError, match="then also failed: rank") as caught:
        launch("fail_everywhere", str(tmp_path))
    assert str(caught.value).count("Traceback") == 1
    assert "Traceback" not in "".join(capfd.readouterr())


def test_error_of_ours_is_raised_again_with_its_rank():
    with pytest.raises(LayoutError, match="dp_shard=3 on 4 ranks") as caught:
        launch("fail_with_layout", nproc=1)
    assert "raised on rank 0" in caught.value.__notes__[0]
    assert "in fail_with_layout" in caught.value.__notes__[0]


def test_an_error_that_a_rank_left_to_another_is_shown_whole_by_who_started_them():
    with pytest.raises(LayoutError, match="dp_shard=3 on 4 ranks") as caught:
        launch("fail_with_layout_that_another_shows")
    assert caught.value.shown_by is None


def test_exception_that_cannot_travel_is_told_in_words():
    with pytest.raises(RankError, match="raised UnpicklableError: one") as caught:
        launch("fail_unpicklable")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("text", ["", "Connection closed by peer [127.0.0.1]:1234"])
def test_cause_is_named_though_its_echo_was_heard_first(tmp_path, text):
    with pytest.raises(RankError, match="the cause") as caught:
        launch("echo_first", text, str(tmp_path))
    assert caught.value.ranks == (1,)


def test_kill_is_named_though_its_echo_was_heard_first(tmp_path):
    with pytest.raises(RankError, match="SIGKILL") as caught:
        launch("echo_first_of_a_kill", str(tmp_path))
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("preload", ["interpreters"], indirect=True)
def test_a_rank_that_is_still_starting_is_not_ended_by_the_question_where_it_is(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, time\nif os.environ.get('RANK') == '1': time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RankError, match="Connection closed by peer") as caught:
        launch("lose_a_peer_that_starts", grace_s=1)
    assert caught.value.ranks == (0,)


def test_lost_peer_without_another_failure_shows_where_the_peers_are(capfd):
    with pytest.raises(RankError, match="Timed out waiting") as caught:
        launch("give_up_on_a_peer", grace_s=1)
    assert caught.value.ranks == (0,)
    assert "a rank that took another path" in caught.value.fix
    assert "in give_up_on_a_peer" in capfd.readouterr().err


def test_a_limit_of_this_process_is_no_lost_peer_though_gloo_reports_it():
    place = "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:201]"
    assert failure_of(0, RuntimeError(f"{place} rv != -1. Too many open files")).weight == 0
    assert failure_of(0, RuntimeError(f"{place} Connection closed by peer [127.0.0.1]:5")).weight == 3


@pytest.mark.parametrize("option", [{"notice_s": 5.0}, {"passes_on": (signal.SIGUSR1,)}])
def test_signals_are_refused_outside_the_main_thread(option):
    with ThreadPoolExecutor(1, "launcher") as pool:
        started = pool.submit(launch, "echo", **option)
        with pytest.raises(ConfigError, match="in the thread 'launcher_0'") as caught:
            started.result(20)
    assert "main thread only" in caught.value.why


def test_weights_of_failures():
    own, abort, lost = (Failure(rank=rank, what="", weight=rank) for rank in (0, 1, 3))
    assert root_cause([lost, abort, own]) is own
    assert root_cause([lost, abort]) is abort


def test_rank_killed_by_a_signal_is_named_with_its_last_words():
    with pytest.raises(RankError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)") as caught:
        launch("signal_self", 1, int(signal.SIGKILL))
    assert caught.value.ranks == (1,)
    assert "last words" in caught.value.why
    assert "memory" in caught.value.fix


def test_abort_points_at_collectives():
    with pytest.raises(RankError, match=r"rank 0 was killed by signal 6 \(SIGABRT\)") as caught:
        launch("signal_self", 0, int(signal.SIGABRT))
    assert "the ranks disagreed about the size or order of a collective" in caught.value.fix


def test_stopped_rank_is_named_and_ended(tmp_path):
    with pytest.raises(RankError, match="rank 1 is stopped") as caught:
        launch("signal_self", 1, int(signal.SIGSTOP), str(tmp_path), stopped_s=0.5, grace_s=0.5)
    assert caught.value.ranks == (1,)
    assert still_alive(noted(tmp_path, 2)) == []


# The launcher names it, as above for both ways; as interpreters each imports torch itself.
@pytest.mark.parametrize("preload", [pytest.param("interpreters", marks=pytest.mark.soak), "forked"], indirect=True)
def test_a_stopped_rank_is_named_as_such_where_its_peer_tells_first(tmp_path):
    """The peer's limit is shorter than the time after which a stopped rank counts as failed; and no grace is given to it."""
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 is stopped") as caught:
        preload = PRELOAD and ("shardwise.verify.preload",)  # torch, once for both
        launch("stop_one_of_a_world", 5, str(tmp_path), grace_s=90, stopped_s=90, preload=preload)
    assert caught.value.ranks == (1,) and "in state T for more than" in str(caught.value)
    assert time.monotonic() - began < 60


def test_time_limit_names_the_ranks_and_shows_their_stacks(capfd):
    with pytest.raises(RankError, match="rank 0, 1 did not finish within 1 s") as caught:
        launch("fail_on", 7, timeout_s=1)
    assert caught.value.ranks == (0, 1)
    assert capfd.readouterr().err.count("in fail_on") == 2


@pytest.mark.parametrize(("hard", "text"), [(True, "exited with code 3 without"), (False, "raised SystemExit: 3")])
def test_exit_without_a_result_is_a_failure(hard, text):
    with pytest.raises(RankError, match=text):
        launch("exit_with", 3, hard)


def test_an_exit_known_only_after_all_that_was_written_has_been_read_is_a_failure(monkeypatch):
    def is_any_alive(watch):
        while watch._selector.get_map():
            for key, _ in watch._selector.select():
                key.data.read(key.fd)
                if key.fd not in key.data.streams():
                    watch._selector.unregister(key.fd)
        while not all(rank.poll() for rank in watch.ranks):
            time.sleep(0.01)
        return False

    monkeypatch.setattr(supervisor.Supervisor, "_alive", is_any_alive)
    with pytest.raises(RankError, match="exited with code 3 without"):
        launch("exit_with", 3, True)


def test_silent_exit_is_a_failure_and_exit_zero_is_none():
    with pytest.raises(RankError, match="exited with code 0 without a result"):
        launch("exit_with", 0, True)
    assert launch("exit_with", 0, False) == [None, None]


@pytest.mark.combinations("values")
@pytest.mark.parametrize("whole", [True, False])
def test_sys_exit_on_one_rank_is_the_failure_where_the_others_missed_it(whole):
    with pytest.raises(RankError, match="rank 1 exited with code 0 without a result") as caught:
        launch("quit_on", 1, whole)
    assert caught.value.ranks == (1,) and caught.value.__cause__ is None
    assert "in quit_on\n    sys.exit(0)" in caught.value.why and "then also failed: rank 0" in caught.value.why
    assert "look for sys.exit" in caught.value.fix and "lost" not in str(caught.value)


def test_failure_after_the_result_is_not_lost():
    with pytest.raises(RankError, match="exited with code 7 after its result"):
        launch("fail_at_exit")


def test_rank_that_ignores_sigterm_is_killed(tmp_path):
    with pytest.raises(RankError, match="boom"):
        launch("ignore_sigterm_and_fail", str(tmp_path), grace_s=0.3)
    assert still_alive(noted(tmp_path, 2)) == []


def test_children_of_ranks_end_with_their_rank(tmp_path):
    assert launch("leave_child", str(tmp_path)) == ["left", "left"]
    assert still_alive(noted(tmp_path, 2)) == []


@pytest.mark.combinations("values")
@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, (-2, 130)), (signal.SIGTERM, (143,))])
def test_signal_to_the_parent_ends_ranks_and_their_children(parent, number, codes):
    process, pids = parent()
    process.send_signal(number)
    assert process.wait(timeout=20) in codes
    assert still_alive(pids) == []


def test_handler_of_the_application_stays_in_charge():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        launch("signal_process", os.getpid())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert set(seen) == {signal.SIGTERM}


def test_second_ctrl_c_does_not_wait_for_the_grace(parent):
    process, pids = parent(grace_s=1000.0, function="deaf", count=2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) in (-2, 130)
    assert still_alive(pids) == []


@pytest.mark.quick("forked-1-10", "interpreters-2-10")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_with_notice_lets_ranks_stop_in_order(parent, number, times):
    process, pids = parent(function="save_when_told", notice_s=30.0)
    for _ in range(times):  # some send it to a process, and again to its group: that is one request
        process.send_signal(number)
        time.sleep(0.05)
    assert process.wait(timeout=20) == Stopped.CODE
    assert still_alive(pids) == []


@pytest.mark.parametrize("preload", [(), ("json",)], ids=["interpreters", "forked"])
def test_a_signal_that_is_passed_on_comes_to_ranks_that_are_ready_and_ends_nothing(parent, tmp_path, preload):
    before_and_after = f"os.kill(os.getpid(), {int(signal.SIGUSR1)})"  # as `shardwise train` may get one at any time
    process, pids = parent(
        function="count_when_told", count=2, passes_on=(signal.SIGUSR1,), preload=preload, around=before_and_after
    )
    process.send_signal(signal.SIGUSR1)
    (tmp_path / "signalled").touch()
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("saved*.1"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == Stopped.CODE
    assert still_alive(pids) == []


def test_a_signal_with_notice_ends_ranks_that_have_nothing_to_save(parent):
    process, pids = parent(notice_s=30.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert still_alive(pids) == []


@pytest.mark.combinations("values")
@pytest.mark.parametrize("ends", ["the time", "a second signal"])
def test_ranks_that_do_not_stop_are_ended(parent, ends):
    process, pids = parent(
        function="never_save_when_told", count=2, grace_s=0.2, notice_s=1.6 if ends == "the time" else 1000
    )
    process.send_signal(signal.SIGTERM)
    time.sleep(0.6 if ends == "the time" else 2.2)  # within 2 s of the first another one is taken for the same request
    assert process.poll() is None
    if ends == "a second signal":
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert still_alive(pids) == []


def test_a_rank_that_fails_while_it_saves_is_named(parent):
    process, pids = parent(function="fail_when_told", count=2, grace_s=0.2, notice_s=30.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 1
    assert "rank 1 raised OSError: the disk is full" in process.stderr.read()
    assert still_alive(pids) == []


def test_a_rank_that_fails_when_asked_to_stop_is_named_though_its_peer_is_ended_by_the_same_signal(parent):
    """It ended with 143 and without a word: the peer's exit code, of the SIGTERM that the launcher sends after a failure, was taken for
    the end of a run that had nothing to save."""
    process, pids = parent(function="fail_when_told_beside_a_plain_rank", count=2, grace_s=5.0, notice_s=30.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 1
    assert "rank 1 raised OSError: the disk is full" in process.stderr.read()
    assert still_alive(pids) == []


def test_a_rank_whose_own_handler_exits_as_by_the_signal_is_no_failure(parent):
    process, pids = parent(function="exit_when_told_beside_a_plain_rank", count=2, grace_s=5.0, notice_s=30.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert still_alive(pids) == []


def test_nothing_outlives_a_parent_killed_by_sigkill(parent):
    process, pids = parent()
    process.kill()
    process.wait()
    assert still_alive(pids) == []


def test_stopped_ranks_do_not_outlive_a_killed_parent(parent):
    process, pids = parent()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    assert still_alive(pids) == []


def test_error_in_a_callback_ends_the_ranks(tmp_path):
    def on_line(rank, stream, line):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        launch("signal_self", 1, 0, str(tmp_path), on_line=on_line)
    # The other rank may have been ended before it could note itself.
    assert still_alive(noted(tmp_path, 1)) == []


def test_nothing_is_left_open(tmp_path):
    launch("add", 1, 2)
    before, others = sorted(os.listdir("/proc/self/fd")), children()
    handler = signal.getsignal(signal.SIGTERM)
    launch("write", on_line=lambda *line: None)
    with pytest.raises(RankError):
        launch("fail_everywhere", str(tmp_path))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert children() == others


def children():
    """Processes this one has started and not ended; a pool of warm ranks may be among them."""
    return sorted(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize(
    ("target", "nproc", "text"),
    [
        ("no_function", 1, "it names no function"),
        ("missing.py:main", 1, "there is no file"),
        ("no.such.module:main", 1, "there is no module 'no'"),
        (f"{TARGETS}:addd", 1, "did you mean .*launch_targets.py:add?"),
        (f"{TARGETS}:add", 0, "at least one rank"),
    ],
)
def test_target_that_cannot_be_meant(target, nproc, text):
    with pytest.raises(ConfigError, match=text):
        launch_local(target, nproc=nproc, preload=PRELOAD)


def test_free_port_can_be_bound():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_default_nproc():
    assert default_nproc("cpu") in (1, 2)
    with pytest.raises(ConfigError, match="not a kind of device"):
        default_nproc("tpu")


def test_launch_room_does_not_import_torch():
    code = "import sys, shardwise.launch, shardwise.testing.plugin; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == 0
