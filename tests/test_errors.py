"""The error tree, and the page made from it."""

import importlib.util
import inspect
import pickle
import sys
from pathlib import Path

import pytest

from shardwise import errors

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "error_index.py"
PUBLIC = [getattr(errors, name) for name in errors.__all__]
TYPES = [kind for kind in PUBLIC if isinstance(kind, type) and issubclass(kind, errors.ShardwiseError)]

spec = importlib.util.spec_from_file_location("error_index", SCRIPT)
error_index = importlib.util.module_from_spec(spec)
sys.modules["error_index"] = error_index
spec.loader.exec_module(error_index)

TREE = '''
class ShardwiseError(Exception):
    """Base of all."""

class ConfigError(ShardwiseError, ValueError):
    """A configuration."""
'''


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_errors_have_three_parts_and_survive_pickling(kind):
    extra = {"ranks": (1, 3)} if "ranks" in inspect.signature(kind).parameters else {}
    error = kind("dp_shard=3 on 4 ranks", why="too many", fix="use 2", name="blocks.0", **extra)
    assert str(error) == "blocks.0: dp_shard=3 on 4 ranks\n  why: too many\n  fix: use 2"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        ("ConfigError", ValueError),
        ("LayoutError", ValueError),
        ("PlanError", ValueError),
        ("UnsupportedError", NotImplementedError),
        ("UsageError", RuntimeError),
        ("RankError", RuntimeError),
        ("NonFiniteError", ArithmeticError),
        ("CheckpointError", OSError),
        ("VerifyError", AssertionError),
    ],
)
def test_errors_are_the_standard_type_a_user_would_catch(kind, standard):
    assert issubclass(getattr(errors, kind), standard)
    assert issubclass(getattr(errors, kind), errors.ShardwiseError)


def test_a_layout_error_is_a_config_error():
    assert issubclass(errors.LayoutError, errors.ConfigError)


def test_errors_leave_no_part_out():
    with pytest.raises(TypeError, match="fix"):
        errors.ConfigError("x", why="y")


def test_the_error_page_is_what_the_code_says(capsys):
    assert error_index.main(["--check"]) == 0, capsys.readouterr().err


def package(tmp_path, body):
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "errors.py").write_text(TREE)
    (folder / "code.py").write_text(body)
    return folder


@pytest.mark.parametrize(
    ("call", "lacking"),
    [
        ('ConfigError("x", why="y")', "fix"),
        ('ConfigError("x", fix="z")', "why"),
        ('ConfigError(why="y", fix="z")', "given"),
        ('ConfigError("x", why="", fix="z")', "why"),
        ('ConfigError("x", why="y", fix=f"")', "fix"),
        ('errors.ConfigError("x", why="y", fix="  ")', "fix"),
        ("MyError()", "given, why, fix"),
    ],
)
def test_a_message_that_lacks_a_part_fails_the_build(tmp_path, capsys, call, lacking):
    body = f"class MyError(ConfigError): pass\ndef f():\n    raise {call}\n"
    status = error_index.main(["--package", str(package(tmp_path, body)), "--page", str(tmp_path / "page.md")])
    assert status == 1
    assert f"pkg/code.py:3: {'MyError' if 'My' in call else 'ConfigError'} lacks {lacking}" in capsys.readouterr().err


def test_the_check_notices_a_changed_message(tmp_path, capsys):
    folder = package(tmp_path, 'def f(n):\n    raise ConfigError(f"n={n!r}", why="a|b " "c", fix="use " + str(n))\n')
    arguments = ["--package", str(folder), "--page", str(tmp_path / "page.md")]
    assert error_index.main(arguments) == 0
    assert "| n={n} | a\\|b c | use {...} | `pkg/code.py` |" in (tmp_path / "page.md").read_text()
    assert error_index.main([*arguments, "--check"]) == 0
    (folder / "code.py").write_text('raise ConfigError("other", why="b", fix="c")\n')
    assert error_index.main([*arguments, "--check"]) == 1
    assert "run python tools/error_index.py" in capsys.readouterr().err
