"""The names of rank processes in ``ps``."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardwise.cli import train_rank
from shardwise.cli.train_rank import name_of_rank, process_named

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


def comm(thread: int | str = "self") -> str:
    return Path(f"/proc/{thread}/comm").read_text().rstrip("\n")


@pytest.mark.parametrize(
    ("rank", "size", "name"),
    [
        (3, 8, "sw:3/8 train"),
        (12, 64, "sw:12/64 train"),
        (127, 1024, "sw:127/1024"),
        (99999, 100000, "sw:99999/100000"),
    ],
)
def test_a_name_fits_into_what_the_kernel_keeps(rank, size, name):
    assert name_of_rank(rank, size, "train") == name and len(name) <= 15


@linux
def test_ps_shows_it_and_threads_that_were_there_keep_theirs():
    end, started = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), end.wait(20)))
    thread.start()
    started.wait(20)
    before, other = comm(), comm(f"self/task/{thread.native_id}")
    try:
        with process_named("sw:3/8 train"):
            shown = subprocess.run(
                ["ps", "-o", "comm=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
            )
            assert shown.stdout.rstrip("\n") == "sw:3/8 train" and comm(f"self/task/{thread.native_id}") == other
    finally:
        end.set()
        thread.join(20)
    assert comm() == before


def test_without_proc_nothing_happens(monkeypatch, tmp_path):
    monkeypatch.setattr(train_rank, "_COMM", tmp_path / "no" / "comm")
    with process_named("sw:0/1 train"):
        pass
