"""A file for what each rank prints."""

import re
import subprocess
import sys

import numpy as np

from shardwise.cli.train_folder import RankLogs


def lines(path) -> list[str]:
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in path.read_text().splitlines()]


def test_nothing_is_written_before_the_run_has_begun(tmp_path):
    logs = RankLogs(tmp_path / "run")
    logs.write(1, "stderr", "early")
    assert not (tmp_path / "run").exists()
    logs.begin()
    logs.write(0, "stdout", "late")
    logs.begin()
    logs.write(1, "stdout", "later")
    assert lines(tmp_path / "run/ranks/rank-1.log") == ["stderr: early", "stdout: later"]  # there at once
    logs.close()
    assert lines(tmp_path / "run/ranks/rank-0.log") == ["stdout: late"]


def test_a_second_run_goes_on_in_the_same_files(tmp_path):
    for word in ("one", "two"):
        logs = RankLogs(tmp_path)
        logs.begin()
        logs.write(0, "stdout", word)
        logs.close()
    assert lines(tmp_path / "ranks/rank-0.log") == ["stdout: one", "stdout: two"]


def test_a_file_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "ranks").write_text("in the way")
    logs = RankLogs(tmp_path)
    logs.begin()
    logs.write(0, "stdout", "x")
    logs.close()


MODEL = """
import os, sys
from shardwise.run.reference import build

def make(**args):
    print("built on", os.environ["RANK"], flush=True)
    print("warned on", os.environ["RANK"], file=sys.stderr, flush=True)
    return build(**args)
"""


def test_what_ranks_print_is_in_their_files_and_on_the_screen(tmp_path):
    (tmp_path / "own.py").write_text(MODEL)
    np.save(
        tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 256
    )  # no text: nothing is written before and after
    words = ("--model.build=own.py:make", "--model.args={dim: 32, num_layers: 1, ffn: 48}", "--data.seq_len=32", "--data.global_batch=4",
             "--data.micro_batch=2", "--train.steps=2", "--log.plot=false", "--train.prove=false", "--data.path=tokens.npy", "--nproc=2")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", *words], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for rank in (0, 1):
        found = lines(tmp_path / f"runs/latest/ranks/rank-{rank}.log")
        assert f"stdout: built on {rank}" in found and f"stderr: warned on {rank}" in found
        assert not any(f"built on {1 - rank}" in line for line in found)
        assert f"[rank {rank}] built on {rank}" in done.stdout


def test_a_run_that_is_refused_leaves_no_files(tmp_path):
    words = (
        "--model.build=own.py:make",
        "--data.path=text.txt",
        "--data.seq_len=8",
        "--nproc=1",
        "--model.args={nonsense: 1}",
    )
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", *words], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0 and "built on 0" in done.stdout
    assert not (tmp_path / "runs").exists()
