"""The examples run as their first lines say, and give the same numbers on one rank and on two."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from shardwise.config import load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*words: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def run_script(path: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_one_process_and_two_ranks_print_the_same_losses(ranks, script):
    (one,), (two, other) = ranks.run(run_script, 1, str(script)), ranks.run(run_script, 2, str(script))
    numbers = [[float(number) for number in re.findall(r"\d+\.\d+", text)] for text in (one, two)]
    assert len(numbers[0]) >= 3 and other == ""
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-4)
    assert numbers[0][-2] < numbers[0][0], "it learns"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_configs_are_understood_and_run(file, tmp_path):
    words = ["--train.steps=2", "--train.eval_every=0", f"--log.dir={tmp_path}", "--log.plot=false"]
    loaded = load_config(file, words)
    assert loaded.origins["optim.lr"].startswith(str(file))
    assert "validation loss" in run("-m", "shardwise", "train", str(file), *words)
