"""The commands that are shown can be given as they are."""

import os
import sys

import pytest

from shardwise.cli.resume_command import program
from shardwise.cli.train import next_commands


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """One below the working directory, with a Python and the script, that is not on the PATH."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "shardwise"):
        (folder / name).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "argv", [str(folder / "shardwise"), "train"])
    return folder


def test_what_is_not_on_the_path_is_named_by_its_place(environment, monkeypatch, tmp_path):
    assert program() == ".venv/bin/shardwise"
    commands = [command for command, _ in next_commands(tmp_path, 4, program())]
    assert all(command.startswith(".venv/bin/shardwise train ") for command in commands)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program() == str(environment / "shardwise")


def test_what_is_on_the_path_is_named_by_its_name(environment, monkeypatch):
    monkeypatch.setenv("PATH", f"{environment}:{os.defpath}")
    assert program() == "shardwise"


def test_another_on_the_path_is_not_taken_for_this_one(environment, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "shardwise").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{other}:{os.defpath}")
    assert program() == ".venv/bin/shardwise"
    monkeypatch.setattr(sys, "argv", [str(other / "shardwise"), "train"])  # unless it is: by pip install --user, say
    assert program() == "shardwise"


def test_without_a_script_python_is_named(environment):
    (environment / "shardwise").unlink()
    assert program() == ".venv/bin/python -m shardwise"


def test_what_was_typed_is_named(environment, monkeypatch, tmp_path):
    """A script beside this Python may be of another installation, or not be there."""
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "src/shardwise/__main__.py"), "train"])
    assert program() == ".venv/bin/python -m shardwise"
    monkeypatch.setenv("PATH", f"{environment}:{os.defpath}")
    assert program() == "python -m shardwise"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "gone" / "shardwise"), "train"])
    (environment / "shardwise").unlink()
    assert program() == "python -m shardwise"
