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
WORK = "def work(setting, function):\n    return function(setting)\n\ndef unchanged(setting):\n    return setting\n"
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


@pytest.mark.quick("of the script", "of a module")
@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("halved", "[1.5, 1.5]"),
        ("functools.partial(scaled, 4)", "[12.0, 12.0]"),
        ("work.unchanged", "[3.0, 3.0]"),
    ],
    ids=["of the script", "with an argument", "of a module"],
)
def test_the_function_itself_is_taken(tmp_path, target, found):
    own = "import functools, work\ndef scaled(times, setting):\n    return Setting(setting.lr * times)\n"
    call = f"    answers = launch_local({target}, nproc=2, args=(Setting(3.0),))\n"
    done = run(tmp_path, own + MAIN.rstrip(" ") + call + CHECKED.replace(", WORDS", ""), "own.py")
    assert (done.stdout, done.stderr) == (f"{found}\n", "")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("lambda: 1", "UsageError: launch_local(<lambda>)\n  why: it cannot be sent to another process: "),
        ("5", "ConfigError: target 5\n  why: it is neither a function nor the name of one"),
    ],
)
def test_what_is_no_function_that_ranks_can_have_is_refused(tmp_path, target, error):
    done = run(tmp_path, f"{MAIN}launch_local({target}, nproc=2)\n", "own.py")
    assert done.returncode == 1 and error in done.stderr


def test_an_error_in_the_function_is_shown_with_its_line(tmp_path):
    done = run(tmp_path, f"{MAIN}launch_local(failing, nproc=2, args=(1,))\n", "own.py")
    assert done.returncode == 1 and "raised OwnError: on purpose" in done.stderr
    assert 'raise OwnError("on purpose")' in done.stderr


def test_a_function_at_the_top_level_is_refused_by_its_name(tmp_path):
    done = run(tmp_path, "launch_local(halved, nproc=2, args=(1,))\n", "own.py")
    assert done.returncode == 1 and f"launch_local(halved) at the top level of {tmp_path / 'own.py'}" in done.stderr


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
