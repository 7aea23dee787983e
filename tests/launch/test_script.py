"""Functions and classes of the script that starts the ranks, as arguments of what they call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from shardwise.launch import launch_local

class Setting:
    def __init__(self, lr):
        self.lr = lr

class OwnError(Exception):
    pass

def halved(setting):
    return Setting(setting.lr / 2)

def failing(setting):
    raise OwnError("on purpose")

WORDS = sys.argv[1:]

{call}
"""
WORK = "def work(setting, function):\n    return function(setting)\n"
MAIN = "if __name__ == '__main__':\n    "
SENT = "answers = launch_local('work:work', nproc=2, args=(Setting(3.0), halved))\n"
CHECKED = "    print([type(answer) is Setting and answer.lr for answer in answers], WORDS)\n"


def run(folder: Path, call: str, *before: str, text: str | None = None) -> subprocess.CompletedProcess:
    (folder / "work.py").write_text(WORK)
    (folder / "own.py").write_text(SCRIPT.format(call=call))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *before], cwd=folder, env=environ, input=text, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("before", [("own.py", "--word"), ("-m", "own", "--word")], ids=["a file", "a module"])
def test_ranks_take_and_return_what_the_script_defines(tmp_path, before):
    done = run(tmp_path, MAIN + SENT + CHECKED, *before)
    assert (done.stdout, done.stderr) == ("[1.5, 1.5] ['--word']\n", "")


def test_an_error_of_the_script_is_told_by_its_name(tmp_path):
    call = MAIN + SENT.replace("halved", "failing")
    done = run(tmp_path, call, "own.py")
    assert done.returncode == 1 and "raised OwnError: on purpose" in done.stderr


def test_a_call_that_every_rank_would_repeat_is_refused(tmp_path):
    done = run(tmp_path, SENT, "own.py")
    assert done.returncode == 1
    assert f"launch_local('work:work') at the top level of {tmp_path / 'own.py'}" in done.stderr
    assert 'fix: put it below if __name__ == "__main__":' in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("lambda setting: 1", "it cannot be sent to another process: "),
        ("open('work.py')", "it cannot be sent to another process: cannot pickle "),
    ],
)
def test_what_no_process_can_be_sent_is_refused(tmp_path, given, said):
    done = run(tmp_path, MAIN + SENT.replace("halved", given), "own.py")
    assert done.returncode == 1 and "UsageError: an argument of a function that ranks call" in done.stderr
    assert f"why: {said}" in done.stderr


def test_functions_of_a_session_are_refused(tmp_path):
    done = run(tmp_path, "", "-", text=SCRIPT.format(call=SENT))
    assert done.returncode == 1
    assert "why: Setting was defined in an interactive session or a notebook" in done.stderr or (
        "why: halved was defined in an interactive session or a notebook" in done.stderr
    )
