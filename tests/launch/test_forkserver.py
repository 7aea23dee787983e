"""Ranks that are forked from one process that has imported what they need; all else of them is in test_launch_local.py."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch.test_launch_local import SOURCE, TARGETS, launch, noted, still_alive

from shardwise.errors import RankError
from shardwise.launch import is_cpu, starting
from shardwise.launch.starting import ForkServer


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that ranks can import by the name that is returned."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        (tmp_path / "brought.py").write_text(text)
        return "brought"

    yield write
    sys.modules.pop("brought", None)


def test_ranks_have_one_parent_which_is_not_this_process_and_has_imported_for_them():
    ranks = launch("lineage", "json.tool", "json.encoder", "wave", preload=("json.tool",))
    assert len({parent for parent, _, _, _ in ranks}) == 1 and ranks[0][0] != os.getpid()
    assert all(found == [True, True, False] and stdin == "" for _, found, _, stdin in ranks)


def test_nothing_is_forked_unless_asked():
    assert [parent for parent, *_ in launch("lineage")] == [os.getpid()] * 2


@pytest.mark.quick("lacks a module", "fails")
@pytest.mark.parametrize(
    "text",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import no_such_module",
        "raise SystemError('a driver is missing')",
    ],
    ids=["starts a thread", "lacks a module", "fails"],
)
def test_where_a_fork_would_lack_something_each_rank_is_an_interpreter(module, text):
    assert [parent for parent, *_ in launch("lineage", preload=(module(text),))] == [os.getpid()] * 2


def test_what_an_import_prints_is_said_once_by_rank_0(module, capfd):
    name = module("import os, sys; print('hello'); os.write(2, b'from C\\n'); sys.stderr.write('no newline')")
    launch("write", preload=(name,))
    out, err = capfd.readouterr()
    assert sorted(out.splitlines())[:2] == ["[rank 0] hello", "[rank 0] no newline"] and out.count("hello") == 1
    assert err.count("[rank 0] from C\n") == 1 and err.count("no newline") == 1 and "[rank 1] to stderr\n" in err


def test_an_import_that_prints_more_than_a_pipe_holds_does_not_hang(module, capfd):
    big = "y" * 400_000
    assert (
        launch("length", big, preload=(module("print(('y' * 1023 + chr(10)) * 300)"),), timeout_s=60) == [400_000] * 2
    )
    assert capfd.readouterr().out.count("[rank 0] yyy") == 300


def test_environment_is_that_of_each_rank_and_known_at_import(module):
    name = module("import os\nSEEN = os.environ['MINE'], os.environ['OMP_NUM_THREADS'], os.environ.get('RANK')")
    words = ("RANK", "LOCAL_RANK", "MINE")
    assert launch("environment", *words, preload=(name,), env={"MINE": "5"}) == [["0", "0", "5"], ["1", "1", "5"]]
    assert launch("seen_by", name, preload=(name,), env={"MINE": "5", "OMP_NUM_THREADS": "3"}) == [("5", "3", None)] * 2


def test_ranks_draw_numbers_of_their_own():
    (first, first_np), (second, second_np) = launch("numbers", preload=("numpy.random", "random"))
    assert first != second and first_np != second_np


def test_the_time_limit_holds_for_imports(module):
    name = module("import time; time.sleep(60)")
    with pytest.raises(RankError, match=r"rank 0, 1 did not begin within 0\.5 s") as caught:
        launch("lineage", preload=(name,), timeout_s=0.5)
    assert caught.value.ranks == (0, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_job_leaves_the_server_to_its_ranks(number):
    assert launch("signal_the_server", number, preload=("json.tool",)) == [True, True]


def test_ranks_do_not_outlive_their_server_and_none_of_them_is_blamed(tmp_path):
    said = r"rank 0, 1 ended with process \d+, which the ranks were forked from, and which was killed by signal 9 \(SIGKILL\)\n"
    with pytest.raises(RankError, match=said) as caught:
        launch("end_the_server", str(tmp_path), preload=("json.tool",))
    assert caught.value.ranks == (0, 1) and "none of them failed" in caught.value.why
    assert still_alive(noted(tmp_path, 2)) == []


def test_a_server_that_has_ended_is_an_error_of_ours():
    with ForkServer(("json.tool",), dict(os.environ)) as server:
        assert server.is_ready(20)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 3 did not start") as caught, open(os.devnull) as file:
            server.start(3, {}, file.fileno(), file.fileno())
        assert caught.value.ranks == (3,)


def test_a_reap_after_an_interrupted_request_gets_its_own_answer():
    """It took the answer that nothing had read: an IndexError, or the exit code of another rank."""
    reader, writer = os.pipe()  # ranks wait for their job, until they are killed
    try:
        with ForkServer(("json",), dict(os.environ), tells_ends=False) as server, open(os.devnull) as null:
            assert server.is_ready(20)
            given = [reader, *[null.fileno()] * 3]
            first, second = (server.fork(dict(os.environ), given) for _ in range(2))
            os.kill(first, signal.SIGKILL)
            os.kill(second, signal.SIGABRT)
            server._connection.send(first)  # a reap that Ctrl-C ended before it was answered
            assert server.reap(second) == -signal.SIGABRT
            server._connection.send((dict(os.environ), len(given)))  # and a fork, of which the answer is still to come
            starting.send_descriptors(server._connection, given)
            third = server.fork(dict(os.environ), given)
            os.kill(third, signal.SIGKILL)
            assert server.reap(third) == -signal.SIGKILL
    finally:
        os.close(reader)
        os.close(writer)


def test_a_start_that_fails_half_way_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    real = ForkServer.start

    def start(server, rank, *given):
        if rank == 1:
            raise OSError(24, "Too many open files")
        return real(server, rank, *given)

    monkeypatch.setattr(ForkServer, "start", start)
    with pytest.raises(OSError, match="Too many open files"):
        launch("signal_self", 7, 0, str(tmp_path), preload=("json.tool",), grace_s=1.0)
    assert still_alive([int(path.name.rpartition(".")[2]) for path in tmp_path.iterdir()]) == []


def _open_files(pid):
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_server_that_has_too_many_files_open_says_so_and_goes_on():
    with ForkServer(("json",), dict(os.environ)) as server, open(os.devnull) as null:
        assert server.is_ready(20)
        before, limits = _open_files(server.pid), resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        free = [number for number in range(len(before) + 5) if number not in before]
        # At 4 what a rank is given is let in, and what would tell of its end is not.
        for room in range(5):
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (free[room], limits[1]))
            with pytest.raises(RankError, match=r"(?s)rank 3 did not start.*Too many open files"):
                server.start(3, dict(os.environ), null.fileno(), null.fileno())
            assert not _children(server.pid) and _open_files(server.pid) == before
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        rank = server.start(3, dict(os.environ), null.fileno(), null.fileno())
        assert rank.pid in _children(server.pid)
        rank.stdout.close()
        rank.stderr.close()


def test_pipes_that_cannot_be_made_are_an_error_of_ours_and_none_is_left(monkeypatch):
    with ForkServer(("json",), dict(os.environ)) as server, open(os.devnull) as null:
        assert server.is_ready(20)
        before, pipe, made = _open_files(os.getpid()), os.pipe, []

        def second_fails():
            made.append(1)
            if len(made) == 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return pipe()

        monkeypatch.setattr(os, "pipe", second_fails)
        with pytest.raises(RankError, match=r"(?s)rank 0 did not start.*Too many open files"):
            server.start(0, dict(os.environ), null.fileno(), null.fileno())
        assert len(made) == 2 and _open_files(os.getpid()) == before


def test_a_server_that_is_stopped_goes_on():
    assert launch("stop_the_server", preload=("json.tool",), timeout_s=30) == ["ended"] * 2


@pytest.mark.parametrize("notice_s", [None, 30.0])
def test_a_signal_while_modules_are_imported_ends_the_start(module, tmp_path, notice_s):
    name = module(f"import os, time; open({str(tmp_path / 'begun')!r}, 'w').close(); time.sleep(60)")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom shardwise.launch import launch_local\n"
        f"launch_local({TARGETS + ':lineage'!r}, nproc=2, preload=({name!r},), notice_s={notice_s})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": SOURCE})
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143


def test_a_signal_that_comes_before_a_rank_is_ready_for_it_is_kept(monkeypatch):
    """A rank that is told to end before it has restored what its server blocks."""
    real = ForkServer.start

    def start(server, *given):
        found = real(server, *given)
        os.kill(found.pid, signal.SIGTERM)
        return found

    monkeypatch.setattr(ForkServer, "start", start)
    with pytest.raises(RankError, match=r"killed by signal 15 \(SIGTERM\)"):
        launch("lineage", preload=("json.tool",))


def test_a_rank_ends_as_an_interpreter_does(tmp_path):
    launch("read_environment_at_exit", str(tmp_path), preload=("json.tool",))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "0", "1": "1"}


def test_what_computes_on_the_cpu_is_told_from_cuda(monkeypatch):
    assert is_cpu("cpu") and not is_cpu("cuda")
    monkeypatch.setattr("shardwise.launch.devices._num_cuda", lambda: 2)
    assert is_cpu("cpu") and not is_cpu("auto")
    monkeypatch.setattr("shardwise.launch.devices._num_cuda", lambda: 0)
    assert is_cpu("auto")
