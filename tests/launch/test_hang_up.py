"""SIGHUP: what a terminal, or ssh, sends to the programs it started when it is closed."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest
from launch.test_launch_local import SOURCE, TARGETS, noted, still_alive

from shardwise.errors import Stopped


@pytest.fixture
def start(tmp_path):
    """Starts a program that launches ranks; gives the process, and the ids of all it started."""
    started = []

    def start(function, count, *, notice_s=30.0, ignored=False, terminal=None):
        code = (
            "from shardwise.launch import launch_local\n"
            f"launch_local({TARGETS + ':' + function!r}, nproc=2, args=({str(tmp_path)!r},), grace_s=1, notice_s={notice_s})\n"
        )

        def as_from_a_shell():
            # Ignored as nohup does it; set either way, as the tests themselves may run under nohup.
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            if terminal is not None:
                fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": SOURCE},
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=as_from_a_shell,
        )
        started.append(process)
        return process, noted(tmp_path, count)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.quick("saves", "has nothing to save")
@pytest.mark.parametrize(
    ("function", "count", "notice_s", "code"),
    [("save_when_told", 4, 30.0, Stopped.CODE), ("sleep_with_child", 4, 30.0, 129), ("sleep_with_child", 4, None, 129)],
    ids=["saves", "has nothing to save", "without notice"],
)
def test_sighup_is_taken_as_sigterm_is(start, function, count, notice_s, code):
    process, pids = start(function, count, notice_s=notice_s)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=20) == code
    assert still_alive(pids) == []


def test_sighup_that_is_ignored_stays_ignored(start):
    process, pids = start("save_when_told", 4, ignored=True)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == Stopped.CODE
    assert still_alive(pids) == []


def test_a_terminal_that_is_closed_lets_ranks_save_though_nothing_can_be_written_any_more(start):
    terminal, its = pty.openpty()
    process, pids = start("talk_and_save_when_told", 4, terminal=its)
    os.close(its)
    os.close(terminal)
    assert process.wait(timeout=20) == Stopped.CODE
    assert still_alive(pids) == []
