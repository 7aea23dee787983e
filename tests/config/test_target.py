"""Functions named by text: found, loaded, and told when missing, without running anything first."""

import os
import subprocess
import sys

import pytest

from shardwise.config.target import check_target, load_target, looks_like_target
from shardwise.errors import ConfigError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "gadgets.py").write_text("import neighbour\nX = 1\ndef build(): return neighbour.VALUE\n")
    (tmp_path / "neighbour.py").write_text("VALUE = 42\n")
    (tmp_path / "loud.py").write_text("raise SystemExit('it ran')\ndef build(): pass\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef build(:\n")
    (tmp_path / "dynamic.py").write_text("def __getattr__(name):\n    return lambda: name\n")
    (tmp_path / "house_pkg").mkdir()
    (tmp_path / "house_pkg" / "__init__.py").write_text("")
    (tmp_path / "house_pkg" / "room.py").write_text("class Model:\n    pass\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("gadgets", "neighbour", "house_pkg", "dynamic"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("a:b", True),
        ("a.b:c", True),
        ("dir/x.py:f", True),
        ("./my model.py:f", True),
        ("run.yaml", False),
        ("a.b", False),
        ("a:b.c", False),
        ("a b:c", False),
        (":f", False),
        ("a:", False),
        ("C:/x.yaml", False),
    ],
)
def test_what_looks_like_a_target(text, is_one):
    assert looks_like_target(text) is is_one


@pytest.mark.parametrize("text", ["gadgets.py:build", "gadgets:build"])
def test_targets_load_with_their_neighbours(here, text):
    assert load_target(text)() == 42


def test_a_file_is_loaded_once_and_its_classes_can_be_found(here):
    model = load_target("house_pkg/room.py:Model")
    assert load_target(str(here / "house_pkg" / "room.py") + ":Model") is model
    assert getattr(sys.modules[model.__module__], "Model") is model  # noqa: B009 - the way pickle finds it


def test_names_made_at_run_time_are_left_to_the_import(here):
    assert load_target("dynamic.py:anything")() == "anything"


def said(text, **kwargs):
    with pytest.raises(ConfigError) as caught:
        check_target(text, what="model.build", **kwargs)
    return str(caught.value)


def test_a_missing_file_is_told_with_one_like_it(here):
    assert said("gadegts.py:build", origin="run.yaml:3") == (
        "model.build='gadegts.py:build' (run.yaml:3)\n"
        f"  why: there is no file gadegts.py (looked in {here})\n"
        "  fix: did you mean 'gadgets.py:build'?"
    )


def test_a_missing_folder_is_told(here):
    assert "there is no file nowhere/x.py" in said("nowhere/x.py:build")


def test_a_missing_module_is_told_with_one_like_it(here):
    assert said("gadegts:build") == (
        "model.build='gadegts:build'\n"
        "  why: there is no module gadegts (looked in the working directory and sys.path)\n"
        "  fix: did you mean 'gadgets'? install it, start from the folder that holds it, or name the file: "
        "path/to/file.py:fn"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("house_pkg.rom:Model", "did you mean 'house_pkg.room'?"),
        ("gadgets.inner:build", "there is no module gadgets.inner"),
        ("json.nope:x", "there is no module json.nope"),
        ("gadgets.py:biuld", "has no 'biuld'\n  fix: did you mean 'build'? it has: build"),
        ("gadgets:biuld", "did you mean 'build'?"),
        ("house_pkg.room:Modle", "did you mean 'Model'?"),
        ("broken.py:build", "line 2, is not valid Python"),
        ("broken:build", "line 2, is not valid Python"),
        ("gadgets", "write pkg.mod:fn, or path/to/file.py:fn"),
    ],
)
def test_what_is_missing_is_named(here, text, words):
    assert words in said(text)


@pytest.mark.parametrize("text", ["sys:nope", "math:nope"])
def test_what_only_an_import_can_tell_is_told_by_the_import(text):
    check_target(text)
    with pytest.raises(ConfigError, match=f"{text.partition(':')[0]} has no 'nope'"):
        load_target(text)


def test_checking_runs_none_of_the_code(here):
    check_target("loud.py:build")
    check_target("loud:build")
    with pytest.raises(SystemExit, match="it ran"):
        load_target("loud.py:build")
    assert not [name for name in sys.modules if name.endswith("_loud")]  # a half-made module is not left behind


def test_checking_a_torch_module_does_not_import_torch():
    code = (
        "import sys\nfrom shardwise.config.target import check_target\ncheck_target('torch.nn.modules.linear:Linear')\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
