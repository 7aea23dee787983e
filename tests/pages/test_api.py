"""docs/api.md is what the docstrings say, holds every public name, and every docstring says what a caller needs."""

import importlib.util
import sys
from pathlib import Path

import pytest

import shardwise as sw

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "tools" / "api_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_page_is_made_from_the_docstrings(tool, capsys):
    assert tool.main(["--check"]) == 0, capsys.readouterr().err


def test_an_old_page_is_reported(tool, tmp_path, capsys):
    (tmp_path / "api.md").write_text((ROOT / "docs" / "api.md").read_text().replace("### window", "### old"))
    assert tool.main(["--check", "--page", str(tmp_path / "api.md")]) == 1
    assert "run python tools/api_pages.py" in capsys.readouterr().err


def test_a_public_name_without_a_place_is_reported(tool, monkeypatch):
    monkeypatch.setattr(sw, "__all__", [*sw.__all__, "cut"])
    monkeypatch.setattr(sw, "cut", lambda: None, raising=False)
    assert list(tool.misplaced(tool.public())) == ["cut: public, and in none of GROUPS"]


def test_every_public_name_has_a_heading(tool):
    lines = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
    assert {f"### {name}" for name in sw.__all__} <= set(lines)


def says_nothing():
    pass


def says_half(first, second):
    """Does something.

    Args:
        first: what it does it to.
    """


class Silent:
    """A class."""

    def speak(self):
        pass


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (says_nothing, ["x: no docstring"]),
        (says_half, ["x: its docstring has no Args for second"]),
        (Silent, ["x.speak: no docstring"]),
    ],
)
def test_a_docstring_that_lacks_something_is_reported(tool, value, found):
    assert list(tool.problems("x", value)) == found


def test_a_docstring_becomes_markdown(tool):
    text = """Does it, by :func:`~shardwise.window` and :class:`Inner`.

With ``a < b``::

    call(1)

Args:
    first: one line
        and the next.
    *args: the rest.

Returns:
    a number.

Example:
    >>> call(2)  # doctest: +SKIP
"""
    assert tool.markdown(text) == (
        "Does it, by [`window`](#window) and `Inner`.\n\nWith `a < b`:\n\n```python\ncall(1)\n```\n\n"
        "**Args**\n\n* `first`: one line and the next.\n* `*args`: the rest.\n\n**Returns** a number.\n\n"
        "```python\n>>> call(2)\n```"
    )
