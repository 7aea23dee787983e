"""Which files and names moved since an older commit, and whether anything else changed with them.

    python tools/moved.py                # rewrites the older commit by the tables below and compares it with the source here
    python tools/moved.py --carry        # and gives measured pages the digest of the moved code, where nothing else changed

A move is pure if the source of the older commit, its imports and names rewritten by ``MODULES`` and ``NAMES``, is the source here: file by
file, as syntax, without docstrings, comments and the order of imports. Files that differ are in ``CHANGED``, with the reason. Whoever has code
of their own that imports files of the package finds the new places in ``MODULES``.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tempfile
import tokenize
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stamp

__all__ = ["BASE", "CHANGED", "MODULES", "NAMES", "differences", "moved_path", "rewritten", "syntax"]

ROOT = Path(__file__).resolve().parents[1]
BASE = "8dc237fe2"
"""The commit before files moved."""

PACKAGE = "shardwise"
MODULES = {
    "anatomy": "model",
    "parallel.tensors": "model.tensors",
    "parallel.trees": "model.pytrees",
    # Techniques: a folder each.
    "parallel.techniques": "techniques.edits",
    "parallel.edges": "techniques.edges",
    "parallel.ddp": "techniques.data.replicas",
    "parallel.buckets": "techniques.data.buckets",
    "parallel.fsdp2": "techniques.data.fsdp2",
    "parallel.order": "techniques.data.unit_order",
    "parallel.passes": "techniques.data.passes",
    "parallel.walk": "techniques.data.walk",
    "parallel.explain": "techniques.data.explain",
    "parallel.outside": "techniques.data.loose_backward",
    "parallel.apart": "techniques.data.penalties",
    "parallel.whole": "techniques.data.scalar_gradients",
    "parallel.units": "techniques.data.units",
    "parallel.precision": "techniques.precision.act",
    "parallel.remat": "techniques.remat.act",
    "parallel.operators": "techniques.remat.operators",
    "parallel.alike": "techniques.remat.recomputation_check",
    "parallel.compile": "techniques.compile.act",
    "parallel.writes": "techniques.compile.write_check",
    "parallel.transforms": "techniques.transforms.act",
    # What parallelize does besides.
    "parallel.refuse": "parallel.guards",
    "parallel.pages": "parallel.large_pages",
    "parallel.build": "parallel.init.build",
    "parallel.tape": "parallel.init.tape",
    "parallel.values": "parallel.init.values",
    "parallel.sources": "parallel.init.sources",
    "parallel.marks": "parallel.init.sentinel",
    # Samples, from files to micro-batches.
    "train.batch": "data.batch",
    "train.labels": "data.labels",
    "train.data": "data.loader",
    "train.order": "data.order",
    "train.same_dataset": "data.same_dataset",
    "train.corpus": "data.corpus",
    "state.datasets": "data.dataset_state",
    # One optimizer step.
    "train.step": "step.step",
    "train.window": "step.window",
    "train.count": "step.token_count",
    "train.exchange": "step.exchange",
    "train.loss": "step.loss",
    "train.sums": "step.loss_check",
    "train.growth": "step.growth",
    "train.kept": "step.grad_stash",
    "train.written": "step.param_write_check",
    "train.refuse": "step.guards",
    "train.mode": "step.mode",
    "train.norm": "step.norm",
    "train.clipping": "step.clip",
    "train.optim": "step.local_optimizer",
    "train.groups": "step.parameter_groups",
    "train.scale": "step.scale",
    "train.settings": "step.settings",
    "train.state": "step.step_state",
    "train.same_data": "step.same_data",
    "train.evaluate": "step.evaluate",
    # The job of the command.
    "train": "run",
    "train.parts": "run.build",
    "train.going_on": "run.resume_check",
    "train.space": "run.disk_space",
    # Files.
    "state.filing": "state.file_layout",
    "state.filling": "state.load_transaction",
    "state.fitting": "state.match",
    "state.outgoing": "state.converted",
    "state.copying": "state.block_copy",
    "state.companions": "state.sidecars",
    "state.vouched": "state.integrity",
    "state.checkpoint.returning": "state.checkpoint.resume",
    "state.checkpoint.points": "state.checkpoint.fault_points",
    "state.checkpoint.keeping": "state.checkpoint.retention",
    # Ranks.
    "state.together": "world.collectively",
    "world.beside": "world.side_group",
    "world.last_words": "world.exit_notice",
}
"""Old -> new place of a module or of a folder and what is in it, below the package."""

NAMES = {
    "Filing": "FileLayout",
    "Filling": "LoadTransaction",
    "state.fitting:Plan": "LoadPlan",
    "state.targets.plan:Plan": "ConversionPlan",
    "Outgoing": "ConvertedTensor",
    "Stored": "TensorSource",
    "HeldTensor": "InMemoryTensor",
    "state.rounding:put": "copy_checked",
    "Vouched": "VerifiedCheckpoint",
    "state.together:together": "collectively",
    "state.checkpoint.points:reach": "at_fault_point",
    "Keeping": "RetentionPolicy",
    "Beside": "SideGroup",
    "heeded": "handle_stop_signals",
    "equalise": "sync_tensors",
    "equalise_buffers": "sync_buffers",
    "is_imagined": "is_fake_group",
    "Outside": "LooseBackward",
    "_outside": "_loose_backward",
    "Apart": "PenaltyGradients",
    "WholeGradients": "ScalarGradients",
    "KeptGradients": "GradStash",
    "WrittenParameters": "ParamWriteCheck",
    "refuse_unsummed": "refuse_unreduced",
    "refuse_unsummed_step": "refuse_unreduced_step",
    "_unsummed": "_unreduced",
    "Returning": "ResumePoint",
    "Copying": "BlockCopy",
    "companion_files": "sidecar_files",
    "owe_last_words": "owe_exit_notice",
    "owe_no_words": "owe_no_notice",
    "world.agreement:imagined": "is_fake",
    "world.beside:imagined": "is_fake",
    "world.init:imagined": "is_fake",
    "Structure": "ModuleSnapshot",
    "_raise_in_our_words": "_raise_translated",
    "Tried": "LockAttempt",
    "launch.lock:let_go": "release",
}
"""Old -> new name: everywhere, or, after ``module:``, in that module and in those that import it from there."""

CHANGED: dict[str, str] = {}
"""File (its new place) -> why it is not what the tables make of the old one."""

_OLD = sorted(MODULES, key=len, reverse=True)
_DOTTED = re.compile(rf"\b{PACKAGE}\.({'|'.join(map(re.escape, _OLD))})(?![\w])")
_SLASHED = re.compile(rf"\b{PACKAGE}/({'|'.join(re.escape(old.replace('.', '/')) for old in _OLD)})(?=\.py\b|/)")
_EVERYWHERE = {old: new for old, new in NAMES.items() if ":" not in old}


def moved_path(path: str) -> str:
    """Where a file of the older commit is now."""
    if path == f"src/{PACKAGE}/train/__init__.py":
        return f"src/{PACKAGE}/run/__init__.py"
    return _slashed(path)


def _new_place(old: str) -> str:
    """The new dotted place of a module below the package."""
    for known in _OLD:
        if old == known or old.startswith(f"{known}."):
            return MODULES[known] + old[len(known) :]
    return old


def _slashed(text: str) -> str:
    return _SLASHED.sub(lambda found: f"{PACKAGE}/" + MODULES[found[1].replace("/", ".")].replace(".", "/"), text)


def rewritten(text: str, module: str | None = None) -> str:
    """The source of a file, its imports and names as they are now; ``module``: its old place below the package, if it is in it."""
    text, local = _imports(text)
    scoped, functions = {**_EVERYWHERE, **local}, set(local)
    for place, new in NAMES.items():
        home, _, old = place.rpartition(":")
        if home and (home == module or _imports_name(text, home, old)):
            scoped[old] = new
            functions.add(old)
    text = _tokens(text, scoped, functions)
    text = _DOTTED.sub(lambda found: f"{PACKAGE}.{MODULES[found[1]]}", text)
    return _quoted(_slashed(text), scoped)


def _imports_name(text: str, home: str, name: str) -> bool:
    """Whether a file of the older commit has ``name`` from the module ``home``, or from the folder that gives it on."""
    places = "|".join(map(re.escape, (home, home.rpartition(".")[0])))
    found = re.findall(rf"from {PACKAGE}\.(?:{places}) import (\([^)]*\)|[^\n(]+)", text)
    return any(re.search(rf"\b{name}\b", names) for names in found)


_FROM = re.compile(rf"^([ \t]*)from {PACKAGE}(?:\.([\w.]+))? import (\([^)]*\)|[^\n(]+)$", re.M)


def _imports(text: str) -> tuple[str, dict[str, str]]:
    """``from package.room import module``, where the module has moved; and new names of the modules that are imported so."""
    local: dict[str, str] = {}

    def one(found: re.Match[str]) -> str:
        indent, room, names = found[1], found[2] or "", found[3].strip("()")
        comment = ""
        if "#" in names and "\n" not in names:
            names, comment = names.split("#", 1)
            comment = f"  #{comment}"
        lines, stay = [], []
        for given in (part.strip() for part in re.sub(r"#[^\n]*", "", names).split(",") if part.strip()):
            name, _, alias = given.partition(" as ")
            old = f"{room}.{name}".strip(".")
            new = _new_place(old)
            is_module = (old in _FILES) and new != old
            if not is_module:
                stay.append(given)
                continue
            package, _, base = new.rpartition(".")
            if alias:
                lines.append(f"{indent}from {PACKAGE}.{package} import {base} as {alias}")
            elif base == name:
                lines.append(f"{indent}from {PACKAGE}.{package} import {base}")
            elif base == "act":
                lines.append(f"{indent}from {PACKAGE}.{package} import {base} as {name}")
            else:
                lines.append(f"{indent}from {PACKAGE}.{package} import {base}")
                local[name] = base
        if not lines:
            return found[0]
        if stay:
            lines.insert(0, f"{indent}from {PACKAGE}{'.' + room if room else ''} import {', '.join(stay)}")
        return "\n".join(lines) + comment

    return _FROM.sub(one, text), local


def _tokens(text: str, names: dict[str, str], plain: set[str]) -> str:
    """``text`` with its identifiers renamed; those in ``plain`` not behind a dot, where they are methods of something else."""
    if not names:
        return text
    lines = text.splitlines(keepends=True)
    found = []
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in names:
            is_import_path = lines[token.start[0] - 1].lstrip().startswith(("from ", "import ")) and before == "."
            if not is_import_path and not (token.string in plain and before == "."):
                found.append(token)
        elif token.type == tokenize.STRING and token.string[1:-1] in names:
            found.append(token)
        before = token.string
    for token in reversed(found):
        row, column = token.start
        line = lines[row - 1]
        old = token.string
        new = names[old] if token.type == tokenize.NAME else f"{old[0]}{names[old[1:-1]]}{old[-1]}"
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return "".join(lines)


def _quoted(text: str, names: dict[str, str]) -> str:
    """Names in backticks of docstrings and comments."""
    for old, new in names.items():
        text = re.sub(rf"(?<=[`~.]){re.escape(old)}(?=`)", new, text)
    return text


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _old_files(commit: str) -> list[str]:
    return [
        path
        for path in _git("ls-tree", "-r", "--name-only", commit, f"src/{PACKAGE}").splitlines()
        if path.endswith(".py")
    ]


def _module(path: str) -> str:
    """The place below the package of a file of it."""
    return path.removeprefix(f"src/{PACKAGE}/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


_FILES = {_module(path) for path in _old_files(BASE)}


def syntax(text: str) -> str:
    """A file as syntax: without docstrings and comments, its imports in one order, formatted in no way."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    imports = sorted(line for node in ast.walk(tree) for line in _import_lines(node))
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            part = getattr(node, field, None)
            if isinstance(part, list):
                setattr(node, field, [one for one in part if not isinstance(one, ast.Import | ast.ImportFrom)])
    named = [ast.unparse(node) for node in tree.body if _is_list_of_names(node)]
    tree.body = [node for node in tree.body if not _is_list_of_names(node)]
    names = sorted(re.findall(r"'([^']+)'", " ".join(named)))
    return "\n".join([*imports, *names, ast.dump(tree)])


def _is_list_of_names(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _import_lines(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {alias.name} as {alias.asname}" for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"from {node.module}.{alias.name} as {alias.asname}" for alias in node.names)


def differences(commit: str) -> Iterator[str]:
    """The files that are not what the tables make of those of ``commit``, a line each."""
    expected = {}
    for path in _old_files(commit):
        expected[moved_path(path)] = rewritten(_git("show", f"{commit}:{path}"), _module(path))
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src" / PACKAGE).rglob("*.py")}
    for path in sorted(here - set(expected)):
        if syntax((ROOT / path).read_text(encoding="utf-8")) != syntax(""):
            yield f"{path}: is new"
    for path, text in sorted(expected.items()):
        if path not in here:
            yield f"{path}: is not there"
        elif syntax(text) != syntax((ROOT / path).read_text(encoding="utf-8")):
            yield f"{path}: is another"


def _carry(commit: str) -> None:
    """Pages that were up to date at ``commit`` are of the code as it is, if what they measure only moved: their stamps say so."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for path, code in _pages_at(commit).items():
            page = ROOT / path
            text = page.read_text(encoding="utf-8")
            made = stamp.made_from(text)
            if made is None or path not in stamp.PAGES or made[1] == stamp.digest(*stamp.PAGES[path].code):
                continue
            if made[1] != stamp.digest(*code, root=Path(folder)):
                print(f"{path}: was older than its code before")
                continue
            if others := [*_not_only_moved(Path(folder), code)]:
                print(f"{path}: to be measured anew, as these are not only moved: {', '.join(others)}")
                continue
            page.write_text(text.replace(made[1], stamp.digest(*stamp.PAGES[path].code)), encoding="utf-8")
            print(f"{path}: carried over")


def _pages_at(commit: str) -> dict[str, tuple[str, ...]]:
    """Page -> the code that it measured, as ``tools/stamp.py`` of ``commit`` has it."""
    module = types.ModuleType("stamp_before")
    module.__file__ = stamp.__file__
    sys.modules[module.__name__] = module
    exec(_git("show", f"{commit}:tools/stamp.py"), vars(module))
    return {path: page.code for path, page in module.PAGES.items()}


def _not_only_moved(before: Path, code: Iterable[str]) -> Iterator[str]:
    """The files among ``code`` of an older tree that are not here as the tables make them."""
    for whole in (before / path for path in code):
        for file in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]:
            path = file.relative_to(before).as_posix()
            module = _module(path) if path.startswith("src/") else None
            text, here = rewritten(file.read_text(encoding="utf-8"), module), ROOT / moved_path(path)
            if not here.exists() or syntax(text) != syntax(here.read_text(encoding="utf-8")):
                yield path


def main() -> int:
    """Compares. Returns the exit status: 1 if something differs that CHANGED does not name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default=BASE, help=f"the older commit ({BASE})")
    parser.add_argument("--carry", action="store_true", help="measured pages of code that only moved are stamped anew")
    given = parser.parse_args()
    found = [*differences(given.base)]
    unknown = [line for line in found if line.partition(":")[0] not in CHANGED]
    for line in found:
        print(line, "" if line in unknown else f"({CHANGED[line.partition(':')[0]]})")
    print(f"{len(_old_files(BASE))} files, {len(found)} that differ, {len(unknown)} of them without a reason")
    if given.carry and not unknown:
        _carry(given.base)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
