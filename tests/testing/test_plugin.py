"""The pytest plugin: the fixture in a session of its own, under xdist, and when pytest itself is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).resolve().parents[2] / "src")

MODULE = """
import os
import pathlib
import pytest
import time

def who(directory):
    pathlib.Path(directory, f"{os.getpid()}.{os.getppid()}").touch()
    return os.getpid()

def forever(directory):
    who(directory)
    time.sleep(60)

HERE = pathlib.Path(__file__).parent / "pids"
WARM, AFTER = str(HERE / "warm"), str(HERE / "after")

@pytest.mark.parametrize("turn", range(4))
def test_pool_is_warm(ranks, turn):
    assert len(set(ranks.run(who, 2, WARM))) == 2

@pytest.mark.timeout(3)
def test_time_limit(ranks):
    ranks.run(forever, 2, AFTER)

def test_afterwards(ranks):
    assert len(set(ranks.run(who, 2, AFTER))) == 2
"""


@pytest.fixture
def project(tmp_path):
    for name in ("warm", "after"):
        (tmp_path / "pids" / name).mkdir(parents=True)
    (tmp_path / "test_inner.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    return tmp_path


def start(project, *options):
    # An installed shardwise brings the plugin by its entry point; named twice it would be registered twice.
    env = {**os.environ, "PYTHONPATH": SOURCE, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "shardwise.testing.plugin", "-q", *options]
    return subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.PIPE, text=True)


def pids(project, when="*"):
    return {int(name) for path in (project / "pids").glob(f"{when}/*") for name in path.name.split(".")}


def still_alive(numbers, seconds=8):
    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    deadline = time.monotonic() + seconds
    while any(map(alive, numbers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in numbers if alive(pid)]


def test_one_pool_serves_the_session_and_ends_with_it_and_a_time_limit_ends_one_run(project):
    process = start(project, "-p", "pytest_timeout")
    output, _ = process.communicate(timeout=90)
    assert "1 failed, 5 passed" in output and "Timeout" in output
    # Two ranks and the process that forked them, through four tests.
    assert len(pids(project, "warm")) == 3
    assert still_alive(pids(project)) == []


@pytest.mark.soak
def test_each_xdist_process_has_its_own_pool(project):
    process = start(project, "-k", "warm", "-p", "xdist", "-n", "2")
    output, _ = process.communicate(timeout=90)
    assert "4 passed" in output
    assert len(pids(project)) == 6
    assert still_alive(pids(project)) == []


def test_ranks_end_when_pytest_is_killed(project):
    process = start(project, "-k", "time_limit")
    deadline = time.monotonic() + 60
    while len(pids(project)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=20)
    assert len(pids(project)) == 3
    assert still_alive(pids(project)) == []


def test_plugin_does_not_import_torch():
    code = "import sys, shardwise.testing.plugin; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == 0
