"""Ports that stay ours, and the state of a process."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from shardwise.launch import held_port
from shardwise.launch.process import Guard, catches, is_stopped, kill_group


def test_held_port_is_for_those_who_know_it():
    with held_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as rank:
            rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank.bind(("127.0.0.1", port))
            rank.listen()


@pytest.mark.parametrize(
    ("code", "wanted"), [("faulthandler.register(12)", True), ("signal.signal(12, signal.SIG_IGN)", False)]
)
def test_a_signal_that_a_process_catches(code, wanted):
    code = f"import faulthandler, signal\n{code}\nprint('ready', flush=True)\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert catches(process.pid, 12) == wanted and not catches(process.pid, 10)
        process.kill()


def test_two_held_ports_differ():
    with held_port() as first, held_port() as second:
        assert first != second


def test_stopped_process_is_seen_and_its_group_killed():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert not is_stopped(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not is_stopped(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_stopped(process.pid)
    kill_group(process.pid)
    assert process.wait(timeout=10) == -signal.SIGKILL
    kill_group(process.pid, alone=False)


def test_a_guard_that_is_stopped_does_not_keep_its_parent():
    began = time.monotonic()
    with Guard() as guard:
        os.kill(guard._process.pid, signal.SIGSTOP)
    assert guard._process.returncode == -signal.SIGKILL and time.monotonic() - began < 30
