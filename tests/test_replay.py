"""The tools that compare a change of structure with the commit before it see what they are there to see."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module


def test_every_difference_of_two_records_has_its_place(tool):
    before = {"loss": "0x1", "calls": [["gather", 8], ["sum", 4]], "gone": 1, "params": {"w": "ab", "b": "cd"}}
    after = {"loss": "0x1", "calls": [["gather", 8], ["sum", 2]], "params": {"w": "ab", "b": "ce"}, "new": 2}
    found = dict(tool("replay").differences(before, after))
    assert list(found) == ["calls [1] [1]", "gone", "new", "params / b"]
    assert found["gone"] == "is gone: it was 1" and found["new"] == "is new: 2"
    assert not [*tool("replay").differences(before, before)]
    assert [*tool("replay").differences([1, 2], [1])] == [("", "[1, 2] became [1]")]


def test_an_unexplained_difference_fails_and_an_explained_one_does_not(tool, monkeypatch, capsys):
    replay = tool("replay")
    assert replay.compare("public", {"a": 1}, {"a": 2}) == ["a"]
    monkeypatch.setitem(replay.EXPLAINED, "public / a", "meant")
    assert replay.compare("public", {"a": 1}, {"a": 2}) == []
    monkeypatch.setitem(replay.MOVED, "public", lambda name, fact: fact + 1)
    assert replay.compare("public", {"b": 1}, {"b": 2}) == []
    assert "1 differences, 1 of them explained" in capsys.readouterr().out


def test_models_that_moved_are_where_replay_looks_for_them(tool):
    tests = TOOLS.parent / "tests"
    named = {name for names in tool("replay").MODULES.values() for name in names}
    assert [name for name in named if not (tests / f"{name.replace('.', '/')}.py").exists()] == []


@pytest.mark.parametrize("first", [[], [str(Path(__file__).parent)]], ids=["alone", "behind the tests' own"])
def test_errors_of_any_process_are_written_down(tmp_path, first):
    """Python imports the first `sitecustomize` on the path."""
    program = "import subprocess, sys, shardwise.errors as e\ne.LayoutError('g', why='w', fix='f')\n"
    program += "if len(sys.argv) < 2: subprocess.run([sys.executable, '-c', sys.orig_argv[2], 'again'], check=True)\n"
    src = TOOLS.parent / "src"
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*first, str(TOOLS / "replay_hook"), str(src)]),
        "SHARDWISE_REPLAY_ERRORS": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=60)
    lines = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert lines == [["LayoutError", "g", "g\n  why: w\n  fix: f"]] * 2 and len([*tmp_path.glob("*.jsonl")]) == 2
