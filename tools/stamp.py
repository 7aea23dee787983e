"""Stamps of the measured pages: the commit, and a digest of the code, from which a page was made; lists outdated pages.

    python tools/stamp.py            # lists the pages, and which of them are older than the code they measure
    python tools/stamp.py docs/units.md

Each page that a tool measures ends with a stamp (a JSON file contains one). The digest is of the syntax of Python files
without their docstrings, so comments and formatting do not count; ``make soak`` fails if the code has another digest.
"""

import argparse
import ast
import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "Page", "digest", "is_stale", "made_from", "stamp", "stamped"]

ROOT = Path(__file__).resolve().parents[1]
_STAMP = re.compile(r"commit `([0-9a-f]+)(?: with changes)?`, code `([0-9a-f]+)`")


@dataclass(frozen=True)
class Page:
    """A file that a tool measures, the command that makes it, and what it measures: files and folders of Python code."""

    path: str
    command: str
    code: tuple[str, ...]


def _src(*names: str) -> tuple[str, ...]:
    return tuple(f"src/shardwise/{name}" for name in names)


TRAINED = _src("_torch", "data", "layout.py", "model", "parallel", "recipe", "run", "step", "techniques", "world")
# A registered model may be any file of the folder.
MODELS = ("tests/models", "tests/layouts.py")
KNOBS = ("tests/techniques/knobs.py", "tests/techniques/observed.py", "tests/techniques/remat/recompute.py", *MODELS)
PAGES = {
    page.path: page
    for page in (
        Page(
            "docs/parity-table.md",
            "python tools/parity_table.py",
            (*TRAINED, *_src("verify"), "tests/verify/matrix.py", *MODELS),
        ),
        Page(
            "docs/knobs-table.md",
            "python tools/knob_table.py",
            (
                *TRAINED,
                *KNOBS,
            ),
        ),
        Page("docs/data/curves.json", "make picture", (*TRAINED, "benchmarks/curves.py")),
        Page(
            "docs/data/pages.json",
            "python tools/draw_pages.py",
            (*TRAINED, *_src("state"), *KNOBS),
        ),
        Page(
            "docs/families.md",
            "python tools/families_table.py",
            (
                *_src("model", "parallel", "recipe", "techniques"),
                *MODELS,
                "tests/verify/held.py",
                "tests/parallel/values.py",
            ),
        ),
        Page(
            "docs/hostile-table.md",
            "python tools/hostile_table.py",
            (*_src("state"), "tests/state/mutant_checkpoints.py"),
        ),
        Page(
            "docs/mistakes.md",
            "python tools/mistakes_page.py",
            # Scripts and commands of users: any of it may be what answers them.
            (
                "src/shardwise",
                "tests/mistakes",
                "tests/step/plain.py",
                *MODELS,
                "tests/run/test_tokens.py",
                "tests/state/test_changed_settings.py",
            ),
        ),
        Page("docs/loss-table.md", "python tools/loss_table.py", (*_src("launch", "world"), "tests/world/losses.py")),
        Page(
            "docs/units.md", "python tools/units_table.py --write", (*_src("model", "recipe"), "tools/units_table.py")
        ),
        Page("docs/mutants.md", "python tools/mutants.py --write", ("src/shardwise", "tools/mutants.py")),
    )
}


def digest(*paths: str, root: Path = ROOT) -> str:
    """Twelve hexadecimal digits of the syntax of the Python files at ``paths``, files or folders below ``root``."""
    found = hashlib.sha256()
    for path in paths:
        whole = root / path
        if not whole.exists():
            raise FileNotFoundError(whole)
        for file in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]:
            found.update(file.relative_to(root).as_posix().encode())
            found.update(repr(_syntax(ast.parse(file.read_bytes()))).encode())
    return found.hexdigest()[:12]


def _syntax(node: object) -> object:
    """``node`` as nested tuples, equal in every version of Python, without docstrings."""
    if isinstance(node, list):
        return [_syntax(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    body = fields.get("body")
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if documented and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = body[1:]  # type: ignore[index]
    new = ("type_params", "kind", "type_comment", "type_ignores")
    return type(node).__name__, [(name, _syntax(value)) for name, value in fields.items() if name not in new]


def stamp(path: str) -> str:
    """The stamp of the page at ``path``, for the code as it is now."""
    commit = _git("rev-parse", "--short=9", "HEAD")
    changed = " with changes" if _git("status", "--porcelain", "--", *PAGES[path].code) else ""
    return f"commit `{commit}{changed}`, code `{digest(*PAGES[path].code)}`"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def stamped(path: str, text: str, *, kept: str | None = None) -> str:
    """``text`` of the Markdown page at ``path``, with a last line that says what it was made from: the code as it is now; or, where only
    some rows were made anew, what ``kept``, the page as it was, says, if anything."""
    before = None if kept is None else _STAMP.search(kept)
    if kept is not None and before is None:
        return text
    made = stamp(path) if before is None else before[0]
    return f"{text.rstrip()}\n\nMeasured at {made}: `python tools/stamp.py` says whether that is the code as it is.\n"


def made_from(text: str) -> tuple[str, str] | None:
    """The commit and the digest that a page's text names; None: it has no stamp."""
    found = _STAMP.search(text)
    return None if found is None else (found[1], found[2])


def is_stale(page: Page, root: Path = ROOT) -> bool:
    """Whether the page was made from other code than there is, or does not say from which."""
    made = made_from((root / page.path).read_text(encoding="utf-8"))
    return made is None or made[1] != digest(*page.code, root=root)


def main() -> int:
    """Says of each page whether it is older than its code. Returns the exit status: 1 if one is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", nargs="*", help=f"these only, of {', '.join(PAGES)}")
    stale = []
    for path in parser.parse_args().page or PAGES:
        old = is_stale(PAGES[path])
        stale += [path] if old else []
        print(f"{'older than its code' if old else 'up to date':20} {path:26} {PAGES[path].command}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
