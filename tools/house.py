"""Checks imports: they point down, torch-free folders stay torch-free, private torch names are in one folder.

The source is parsed, not run. A *room* is a module or folder directly under the package; rooms are ordered, and a room
imports only rooms before it, wherever the import statement is; some folders are the top of their room, and no other
file of the room imports them. ``if TYPE_CHECKING:`` imports cost nothing at run time and are accepted::

    python tools/house.py            # exit 1, with a line per fault
    python tools/house.py --report   # and how large it is, room by room; circles of files; files with one importer
    python tools/house.py --write    # and writes that into CONTRIBUTING.md, with the walks of tools/walks.py
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Lowest first; rooms that shared a row could not import each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("_torch",),
    ("config",),
    ("layout",),
    ("recipe",),
    ("launch",),
    ("world",),
    ("model",),
    ("techniques",),
    ("dialects",),
    ("parallel",),
    ("data",),
    ("state",),
    ("step",),
    ("run",),
    ("verify",),
    ("testing",),
    ("cli",),
)
TORCH_FREE = ("errors", "config", "layout", "recipe", "launch", "dialects", "cli")
APART = "techniques"  # the room whose folders do not import each other, ...
READ_EARLY = ("__init__", "options", "rule")  # ... and their files that the command line reads before it knows torch
ROOFS = (("state", "checkpoint"),)  # folders on top of their room: nothing beside them in it imports them
# Lines that rooms are to have before the next technique moves in: aims, not limits. Rooms of one row share theirs.
AIMS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("errors", "layout", "__init__", "__main__"), 640),
    (("_torch",), 1_450),
    (("config", "dialects"), 2_550),
    (("recipe",), 1_250),
    (("launch", "testing"), 2_850),
    (("world",), 3_500),
    (("model",), 2_250),
    (("techniques",), 9_800),
    (("parallel",), 2_500),
    (("data",), 3_900),
    (("state",), 8_000),
    (("step",), 3_800),
    (("run",), 4_900),
    (("verify", "cli"), 3_900),
)
_SHORT = 60  # lines of a file that its only importer could have
_ROW = re.compile(r"^(?P<rooms>[a-z_ ]+?) +\d+ +(?P<lines>[\d,]+) +[\d,]+$", re.MULTILINE)
FACES = ("__init__", "__main__")  # of the package itself: they stand before the house and open into any room


def faults(package: Path) -> list[str]:
    """Every fault of a package folder, each with file and line."""
    level = {room: number for number, row in enumerate(ORDER) for room in row}
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package.parent).with_suffix("").parts
        room = module[1]
        place = path.relative_to(package.parent).as_posix()
        tree = ast.parse(path.read_bytes(), filename=str(path))
        if room not in level and room not in FACES:
            found.append(f"{place}: room '{room}' has no place in the order of tools/house.py")
            continue
        found += [f"{place}:{line}: {text}" for line, text in _private_torch(tree) if room != "_torch"]
        if room in FACES:
            continue
        found += [f"{place}:{line}: {text}" for line, text in _upward(tree, module, level)]
        if room == APART:
            found += [f"{place}:{line}: {text}" for line, text in _sideways(tree, module, package)]
        if room in TORCH_FREE or (room == APART and module[-1] in READ_EARLY):
            found += [f"{place}:{line}: {text}" for line, text in _torch_at_module_level(tree)]
    return found


def _upward(tree: ast.Module, module: tuple[str, ...], level: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Imports of a room that does not stand before this one."""
    room = module[1]
    for node in _nodes(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for target in _imported(node, module):
            parts = target.split(".")
            if parts[0] != module[0]:
                continue
            if parts[1:2] == [room]:
                if tuple(parts[1:3]) in ROOFS and module[1:3] != tuple(parts[1:3]):
                    yield node.lineno, f"imports {target}, which is built on top of {room}"
                continue
            other = parts[1] if len(parts) > 1 else ""
            if other not in level:
                yield node.lineno, f"imports {target}: the package's face stands above every room; import the room"
            elif level[other] >= level[room]:
                yield node.lineno, f"{room} imports {other}, which does not stand before it"


def _sideways(tree: ast.Module, module: tuple[str, ...], package: Path) -> Iterator[tuple[int, str]]:
    """Imports of another folder beside this file's own."""
    for node in _nodes(tree):
        if len(module) > 3 and isinstance(node, ast.Import | ast.ImportFrom):
            for target in _imported(node, module):
                parts = target.split(".")
                beside = tuple(parts[:2]) == module[:2] and parts[2:3] and parts[2] != module[2]
                if beside and (package / APART / parts[2]).is_dir():
                    yield node.lineno, f"{module[2]} imports {target}: a technique knows no other"


def _torch_at_module_level(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _nodes(tree, into_functions=False):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.partition(".")[0] in ("torch", "numpy", "safetensors", "transformers"):
                yield node.lineno, f"imports {name} at module level in a torch-free room"


def _private_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names under torch: in an import, or as an attribute of a name that an import bound to torch."""
    bound: dict[str, str] = {}
    nodes = list(_nodes(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if _is_private(alias.name):
                        yield (
                            node.lineno,
                            f"imports {alias.name}: private names of torch belong in _torch/",
                        )
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                if _is_private(full):
                    yield node.lineno, f"imports {full}: private names of torch belong in _torch/"
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = _root_name(node)
            if root in bound:
                yield node.lineno, f"uses {ast.unparse(node)}: private names of torch belong in _torch/"


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def _root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _nodes(tree: ast.AST, *, into_functions: bool = True) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees (and, if asked, those inside functions)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and _last_part(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from _nodes(other, into_functions=into_functions)
            continue
        if not into_functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from _nodes(node, into_functions=into_functions)


def _last_part(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _imported(node: ast.Import | ast.ImportFrom, module: tuple[str, ...]) -> list[str]:
    """Dotted names an import statement brings in, relative ones made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        # `module` ends in __init__ for a package, so one level up from it is the package itself, as for a plain file.
        base = ".".join([*module[: len(module) - node.level], *([base] if base else [])])
    # `from shardwise import layout` names a room in its second half, `from shardwise.state import checkpoint` a roof.
    above = {module[0], *(".".join((module[0], *roof[:-1])) for roof in ROOFS)}
    return [f"{base}.{alias.name}" if base in above else base for alias in node.names]


def importers(package: Path) -> dict[str, set[str]]:
    """Module -> the modules that import it when they run, wherever the import stands."""
    modules = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in _nodes(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for target in _targets(node, modules):
                if target != name:
                    found[target].add(name)
    return found


def _targets(node: ast.Import | ast.ImportFrom, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a statement imports: a folder's ``__init__`` only for names that are no files in it."""
    base = "" if isinstance(node, ast.Import) else f"{node.module}."
    for alias in node.names:
        for target in (f"{base}{alias.name}", base.rstrip(".")):
            known = next((each for each in (target, f"{target}.__init__") if each in modules), None)
            if known:
                yield known
                break


def circles(importing: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of modules of which each imports the others, by way of others or at once: Tarjan's strongly connected components."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        path.append(name)
        for other in sorted(importing.get(name, ())):
            if other not in number:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == number[name]:
            circle = set(path[path.index(name) :])
            del path[path.index(name) :]
            if len(circle) > 1:
                found.append(circle)

    for name in sorted(importing):
        if name not in number:
            visit(name)
    return found


def lines_by_room(package: Path) -> dict[str, tuple[int, int]]:
    """Room -> its files and lines, lowest room first."""
    found = {}
    for room in (*(room for row in ORDER for room in row), *FACES):
        files = [*(package / room).rglob("*.py")] or [*package.glob(f"{room}.py")]
        if files:
            found[room] = len(files), sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    return found


def report(package: Path) -> str:
    """How large the house is, room by room, in files and lines, beside what is aimed at; circles of files; files that one other
    imports."""
    rooms = lines_by_room(package)
    importing = importers(package)
    lonely = [name for name, others in importing.items() if len(others) == 1 and not name.endswith("__init__")]
    short = [name for name in lonely if _num_lines(package, name) < _SHORT]
    rows = []
    for names, aim in AIMS:
        here = [rooms[name] for name in names if name in rooms]
        if here:
            rows.append((" ".join(names), sum(files for files, _ in here), sum(lines for _, lines in here), aim))
    total = "in all", sum(row[1] for row in rows), sum(row[2] for row in rows), sum(row[3] for row in rows)
    return "\n".join(
        [
            f"{'room':32} {'files':>5} {'lines':>7} {'aim':>7}",
            *(f"{room:32} {files:5} {lines:7,} {aim:7,}" for room, files, lines, aim in (*rows, total)),
            "",
            f"imports that point up: {len(faults(package))}",
            f"circles of files: {len(circles(importing))}",
            f"files with one importer: {len(lonely)}, of which {len(short)} have fewer than {_SHORT} lines",
        ]
    )


def _num_lines(package: Path, module: str) -> int:
    path = package.parent / f"{module.replace('.', '/')}.py"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else _SHORT


def growth(package: Path, page: Path) -> list[str]:
    """The rooms that have more lines than in the report that ``page`` has."""
    before, now = _lines_in(page.read_text(encoding="utf-8")), _lines_in(report(package))
    return [
        f"{room}: {before[room]:,} -> {now[room]:,} lines" for room in now if now[room] > before.get(room, now[room])
    ]


def _lines_in(text: str) -> dict[str, int]:
    """Room -> lines, of the rows of a report."""
    return {row["rooms"]: int(row["lines"].replace(",", "")) for row in _ROW.finditer(text)}


def _write(package: Path) -> None:
    """Puts the report and the lengths of the walks between their marks in CONTRIBUTING.md."""
    walks = subprocess.run(
        [sys.executable, ROOT / "tools" / "walks.py"], capture_output=True, text=True, check=True
    ).stdout
    lengths = [line for line in walks.splitlines() if " calls  " in line]
    page = ROOT / "CONTRIBUTING.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- house -->\n")
    _, end, after = rest.partition("<!-- /house -->")
    block = "\n".join(["```text", report(package), "", *lengths, "```", ""])
    page.write_text(before + begin + block + end + after, encoding="utf-8")


def main() -> int:
    """Check this repository. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", action="store_true", help="print how large it is, too")
    parser.add_argument("--write", action="store_true", help="write it into CONTRIBUTING.md, too")
    package, given = ROOT / "src" / "shardwise", parser.parse_args()
    if given.report:
        print(report(package))
    if given.write:
        _write(package)
    for line in growth(package, ROOT / "CONTRIBUTING.md"):
        print(f"grown since CONTRIBUTING.md was written: {line}")
    found = faults(package)
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
