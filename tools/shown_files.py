"""Fills the blocks of README and docs that show a file, or the difference of two, from the files themselves.

The line before such a block is ``<!-- file: PATH -->`` or ``<!-- diff: OLD NEW -->``, with paths relative to the root. Between
``<!-- lines -->`` and ``<!-- /lines -->`` is a table of the lines that each ``after`` script of ``examples/from`` adds::

    python tools/shown_files.py            # write the blocks
    python tools/shown_files.py --check    # exit 1 if a block is not what the file says
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["filled", "main", "pages"]

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^<!-- (file|diff): ([^\n]+) -->\n```(\w+)\n(?:(?!```)[^\n]*\n)*```$", re.MULTILINE)
LINES = re.compile(r"^<!-- lines -->\n(?:[^\n]*\n)*?<!-- /lines -->$", re.MULTILINE)
SCRIPTS = {
    "nanogpt": "a loop like nanoGPT's, whose model returns its loss",
    "plain": "a plain loop, kept as a loop",
    "accelerate": "accelerate",
    "fabric": "Lightning Fabric",
    "fsdp2": "FSDP2 by hand",
    "trainer": "`Trainer` of transformers",
    "peft": "a plain loop with adapters of PEFT",
}


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def filled(text: str) -> str:
    """The page with each such block as its files are."""
    return LINES.sub(lambda _: f"<!-- lines -->\n{_lines()}<!-- /lines -->", BLOCK.sub(_block, text))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Fill the blocks of the pages that show files.")
    parser.add_argument("--check", action="store_true", help="compare with the pages instead of writing them")
    args = parser.parse_args(argv)
    status = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) == text:
            continue
        if args.check:
            print(f"{page} shows a file as it is not: run python tools/shown_files.py", file=sys.stderr)
            status = 1
        else:
            page.write_text(new, encoding="utf-8")
            print(page)
    return status


def _block(found: re.Match[str]) -> str:
    kind, words, language = found.groups()
    shown = _file(words) if kind == "file" else _difference(*words.split())
    return f"<!-- {kind}: {words} -->\n```{language}\n{shown}```"


def _file(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(_file(old).splitlines(), _file(new).splitlines(), lineterm="", n=2)
    kept = [line.rstrip() for line in lines if not line.startswith(("--- ", "+++ "))]
    return "\n".join(kept) + "\n"


def _lines() -> str:
    rows = ["| script | lines it has | lines removed | lines added |", "|---|--:|--:|--:|"]
    for name, what in SCRIPTS.items():
        old, new = (_code(f"examples/from/{name}_{end}.py") for end in ("before", "after"))
        signs = [line[:2] for line in difflib.ndiff(old, new)]
        rows.append(f"| {what} | {len(old)} | {signs.count('- ')} | {signs.count('+ ')} |")
    return "\n".join(rows) + "\n"


def _code(path: str) -> list[str]:
    return [line for line in _file(path).splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
