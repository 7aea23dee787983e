"""Of a product of arguments, `make test` runs enough to have each value, or each two values, and soak the rest."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = """
import pytest

@pytest.mark.combinations("{what}")
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize(("c", "d"), [(0, "x"), (1, "y"), pytest.param(2, "z", marks=pytest.mark.soak)])
def test_it(a, b, c, d):
    print("\\nran", a, b, c, d)
"""


def _run(directory: Path, what: str, *words: str) -> str:
    (directory / "test_plain.py").write_text(what if "def " in what else PLAIN.format(what=what))
    markers = ("soak: rarely", "combinations: of arguments", "quick: by ids")
    (directory / "pytest.ini").write_text("\n    ".join(("[pytest]\nmarkers =", *markers)) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-q", "-p", "combinations", "-p", "no:cacheprovider", *words],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


def _ran(*words) -> set[tuple[str, ...]]:
    return {tuple(line.split()[1:5]) for line in _run(*words).splitlines() if line.startswith("ran ")}


@pytest.mark.parametrize(("what", "size", "at_most"), [("values", 1, 4), ("pairs", 2, 14)])
def test_each_value_or_each_pair_is_run(tmp_path, what, size, at_most):
    ran, left_out = _ran(tmp_path, what, "-m", "not soak"), _ran(tmp_path, what, "-m", "soak")
    assert 0 < len(ran) <= at_most and not ran & left_out
    assert ran | left_out == {(a, b, c, d) for a in "0123" for b in "012" for c, d in ("0x", "1y", "2z")}
    assert not any(c == "2" for _, _, c, _ in ran)  # marked soak by itself

    def parts(rows):
        return {part for row in rows for part in itertools.combinations(enumerate(row), size)}

    assert parts(ran) == parts(row for row in ran | left_out if row[2] != "2")


def test_a_combination_that_is_asked_for_by_name_runs(tmp_path):
    (named,) = _ran(tmp_path, "values", "-m", "not soak", "test_plain.py::test_it[1-y-2-3]")
    assert named == ("3", "2", "1", "y")


def test_another_word_is_refused(tmp_path):
    assert 'combinations("values") or combinations("pairs")' in _run(tmp_path, "some")


QUICK = """
import pytest

@pytest.mark.quick({names})
@pytest.mark.parametrize("a", ["tp[2]", "tp", "cp", "dp"])
def test_it(a):
    print("\\nran", a)
"""


def test_variants_that_are_named_are_run_and_a_name_of_none_is_refused(tmp_path):
    names = {"not soak": {("tp[2]",), ("cp",)}, "soak": {("tp",), ("dp",)}}
    for marks, expected in names.items():
        assert _ran(tmp_path, QUICK.format(names='"tp[2]", "c*"'), "-m", marks) == expected
    assert _ran(tmp_path, QUICK.format(names='"cp"'), "-m", "not soak", "test_plain.py::test_it[cp]") == {("cp",)}
    assert "names no variant by ['sp']" in _run(tmp_path, QUICK.format(names='"cp", "sp"'))
