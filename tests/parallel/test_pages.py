"""The pages about units, values and recipes: every example runs and prints what is shown. The examples likewise."""

import contextlib
import io
import re
import runpy
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("units", "init", "recipe")
EXAMPLE = re.compile(
    r"<!-- (run[^>]*?) -->\n```python\n(.*?)```\n\n<!-- output -->\n```text\n(.*?)```", flags=re.DOTALL
)


def examples() -> list:
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        shown = EXAMPLE.findall(text)
        assert len(shown) == text.count("```python"), f"an example of docs/{page}.md is not run"
        found += [pytest.param(*example, id=f"{page}-{i}") for i, example in enumerate(shown)]
    return found


def run_script(path: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(("marker", "code", "output"), examples())
def test_an_example_of_a_page_prints_what_is_shown(ranks, tmp_path, marker, code, output):
    path = tmp_path / "example.py"
    path.write_text(code)
    printed = ranks.run(run_script, 2 if "2 ranks" in marker else 1, str(path))
    assert printed[0] == output
    assert not any(printed[1:])


@pytest.mark.parametrize("name", ["example_units.py", "example_init.py"])
def test_the_examples_print_the_same_alone_and_on_two_ranks(ranks, name):
    path = str(ROOT / "examples" / name)
    alone, (first, second) = ranks.run(run_script, 1, path)[0], ranks.run(run_script, 2, path)
    assert first == alone and second == ""
    assert len(re.findall(r"\d+\.\d+", alone)) >= 6
