"""Measured pages say from which code they were made, and one that is older than its code is seen."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("stamp_script", ROOT / "tools" / "stamp.py")
stamps = sys.modules["stamp_script"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stamps)


@pytest.mark.parametrize("page", stamps.PAGES.values(), ids=lambda page: page.path)
def test_a_measured_page_names_its_commit_and_the_code_it_measures(page):
    assert stamps.made_from((ROOT / page.path).read_text(encoding="utf-8")) is not None
    assert not _imported(page.code), f"what {page.path} is measured by imports more than its digest is of"


def _imported(code):
    """Modules of the tests that files of ``code`` import, and that are not in it."""
    tests, covered = ROOT / "tests", [ROOT / path for path in code]
    found = set()
    for whole in covered:
        for file in whole.rglob("*.py") if whole.is_dir() else [whole]:
            for node in ast.walk(ast.parse(file.read_bytes())) if file.is_relative_to(tests) else ():
                names = (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [each.name for each in getattr(node, "names", ())]
                )
                places = [tests / (str(name).replace(".", "/") + ".py") for name in names]
                found |= {each for each in places if each.exists() and not any(each.is_relative_to(w) for w in covered)}
    return found


@pytest.mark.soak
@pytest.mark.parametrize("page", stamps.PAGES.values(), ids=lambda page: page.path)
def test_a_measured_page_is_not_older_than_its_code(page):
    assert not stamps.is_stale(page), f"{page.path}: make it anew with {page.command}"


def test_code_that_computes_otherwise_makes_a_page_stale_and_comments_do_not(tmp_path):
    (tmp_path / "code").mkdir()
    code, text = tmp_path / "code" / "one.py", "def f(x):\n    return x + 1\n"
    code.write_text(text)
    page = stamps.Page("page.md", "make it", ("code",))
    (tmp_path / "page.md").write_text(
        f"Measured at commit `abc123456`, code `{stamps.digest('code', root=tmp_path)}`\n"
    )
    assert not stamps.is_stale(page, tmp_path)
    code.write_text('"""Words."""\n\n# why\ndef f(x):\n    """More words."""\n    return (\n        x + 1\n    )\n')
    assert not stamps.is_stale(page, tmp_path)
    code.write_text(text.replace("1", "2"))
    assert stamps.is_stale(page, tmp_path)
    code.write_text(text)
    assert not stamps.is_stale(page, tmp_path)
    (tmp_path / "code" / "two.py").write_text("")
    assert stamps.is_stale(page, tmp_path)
    (tmp_path / "page.md").write_text("A page without.\n")
    assert stamps.is_stale(page, tmp_path)


def test_a_page_of_which_some_rows_are_new_keeps_what_the_old_ones_were_made_from():
    path = "docs/hostile-table.md"
    new = stamps.stamped(path, "| rows |\n")
    assert new.startswith("| rows |\n\nMeasured at commit `") and stamps.made_from(new)[1] == stamps.digest(
        *stamps.PAGES[path].code
    )
    old = "| rows |\n\nMeasured at commit `abc123456`, code `0123456789ab`\n"
    assert stamps.made_from(stamps.stamped(path, "| others |\n", kept=old)) == ("abc123456", "0123456789ab")
    assert stamps.made_from(stamps.stamped(path, "| others |\n", kept="| rows |\n")) is None
