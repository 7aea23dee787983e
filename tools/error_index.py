"""Writes docs/errors.md: every error message that Shardwise can raise, read from the code that raises it.

The source is parsed, not run. Each construction of a :class:`ShardwiseError` makes one row; its parts are shown as
written, with ``{...}`` where a value is filled in. A construction without ``given``, ``why`` or ``fix``, or with an
empty one, is reported with its place, and the exit status is 1::

    python tools/error_index.py            # write docs/errors.md
    python tools/error_index.py --check    # exit 1 if the page is not what the code says
"""

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Message", "Problem", "collect", "main", "page"]

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("given", "why", "fix")


@dataclass(frozen=True, order=True)
class Message:
    """One place that raises: the error's type, the file (no line, so that the page stays as it is), the parts."""

    kind: str
    file: str
    given: str
    why: str
    fix: str


@dataclass(frozen=True)
class Problem:
    """A construction that does not give all parts."""

    file: str
    line: int
    text: str


def collect(package: Path) -> tuple[dict[str, str], list[Message], list[Problem]]:
    """Error types with their first docstring line, messages and problems of a package folder."""
    trees = {path: ast.parse(path.read_bytes(), filename=str(path)) for path in sorted(package.rglob("*.py"))}
    kinds = _error_types(trees.values())
    messages: list[Message] = []
    problems: list[Problem] = []
    for path, tree in trees.items():
        file = path.relative_to(package.parent).as_posix()
        for call, kind in _constructions(tree, kinds):
            found = _parts(call)
            lacking = [part for part in PARTS if not found.get(part, "").strip()]
            if lacking:
                problems.append(Problem(file, call.lineno, f"{kind} lacks {', '.join(lacking)}"))
            else:
                messages.append(Message(kind, file, *(found[part] for part in PARTS)))
    return kinds, sorted(set(messages)), problems


def page(kinds: dict[str, str], messages: Sequence[Message]) -> str:
    """The Markdown page."""
    lines = [
        "# Errors",
        "",
        "Every message Shardwise raises on purpose: what was given, why it cannot work, what to change. `{...}` stands",
        "for a value filled in. This page is made from the code: `python tools/error_index.py`.",
    ]
    for kind, about in kinds.items():
        rows = [message for message in messages if message.kind == kind]
        if not rows:
            continue
        lines += ["", f"## {kind}", "", about, "", "| given | why | fix | raised in |", "|---|---|---|---|"]
        lines += [f"| {_cell(row.given)} | {_cell(row.why)} | {_cell(row.fix)} | `{row.file}` |" for row in rows]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Make docs/errors.md from the code.")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    parser.add_argument("--package", type=Path, default=ROOT / "src" / "shardwise", help="the package to read")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "errors.md", help="the page to write or compare")
    args = parser.parse_args(argv)
    kinds, messages, problems = collect(args.package)
    for problem in problems:
        print(f"{problem.file}:{problem.line}: {problem.text}", file=sys.stderr)
    text = page(kinds, messages)
    if args.check:
        current = args.page.read_text(encoding="utf-8") if args.page.exists() else ""
        if current != text:
            print(f"{args.page} is not what the code says: run python tools/error_index.py", file=sys.stderr)
            return 1
    else:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(text, encoding="utf-8")
        print(f"{args.page}: {len(messages)} messages of {len({message.kind for message in messages})} types")
    return 1 if problems else 0


def _error_types(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Names of ShardwiseError and all classes built on it, in order of appearance, with their first docstring line."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds: dict[str, str] = {}
    grown = True
    while grown:  # until no further class is built on a known one
        grown = False
        for node in classes:
            bases = {_last_name(base) for base in node.bases}
            if node.name not in kinds and (node.name == "ShardwiseError" or bases & set(kinds)):
                kinds[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]
                grown = True
    return kinds


def _constructions(tree: ast.Module, kinds: dict[str, str]) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (kind := _last_name(node.func)) in kinds:
            yield node, kind


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _parts(call: ast.Call) -> dict[str, str]:
    found = {keyword.arg: _template(keyword.value) for keyword in call.keywords if keyword.arg}
    if call.args and not isinstance(call.args[0], ast.Starred):
        found["given"] = _template(call.args[0])
    return found


def _template(node: ast.expr) -> str:
    """An expression as the text it makes, with ``{...}`` where a value comes in."""
    if isinstance(node, ast.Constant):
        return str(node.value) if node.value is not None else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}" if _is_short(node.value) else "{...}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.IfExp):
        first, second = _template(node.body), _template(node.orelse)
        return f"{first} / {second}" if first and second else f"[{first or second}]"
    return f"{{{ast.unparse(node)}}}" if _is_short(node) else "{...}"


def _is_short(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and len(ast.unparse(node)) <= 40


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    sys.exit(main())
