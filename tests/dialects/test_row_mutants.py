"""One cell of a row changed: a rule of the tables, a file of the system, a refusal or its page notices."""

import importlib.util
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.dialects import table, values, words
from shardwise.errors import ConfigError

HERE = Path(__file__).parent
COUNT = 320
FACTS = (
    "micro",
    "global",
    "tp",
    "lr",
    "decay",
    "clip",
    "steps",
    "offload",
    "remat",
    "keep",
    "warmup",
    "mp",
    "shard",
    "epochs",
)
PATHS = (HERE / "test_tables.py", HERE / "test_import.py", HERE.parent.parent / "tools" / "dialects.py")


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"of_mutants_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RULES, FILES, PAGES = map(loaded, PATHS)


def verdict(cell: str, draw: random.Random) -> str:
    """One verdict becomes another."""
    parts = cell.split(" ; ")
    place = draw.randrange(len(parts))
    head, colon, old = parts[place].rpartition(": ")
    parts[place] = f"{head}{colon}{draw.choice([one for one in table.VERDICTS if one != old.strip()])}"
    return " ; ".join(parts)


def word(cell: str, draw: random.Random) -> str:
    """One entry of a single value goes, or is that of another value."""
    parts = cell.split(" ; ")
    places = [place for place, part in enumerate(parts) if ": " in part]
    if not places:
        return cell
    place = draw.choice(places)
    head, _, rest = parts[place].partition(": ")
    parts[place : place + 1] = draw.choice([[], [f"{head}x: {rest}"]])
    return " ; ".join(parts) or "-"


def action(cell: str, draw: random.Random) -> str:
    """One fact, key or constant becomes another."""
    if cell in ("-", ""):
        return f"@{draw.choice(FACTS)}"
    parts = cell.split(" ; ")
    place = draw.randrange(len(parts))
    head, colon, rest = parts[place].rpartition(": ")
    if "=" in rest and not rest.startswith("= ") and draw.random() < 0.5:
        target, _, constant = rest.partition("=")
        other = {"true": "false", "false": "true", "full": "grad_op", "ddp": "full", "1": "2", "bf16": "fp16"}.get(
            constant, f"{constant}0"
        )
        rest = f"{target}={other}"
    else:
        rest = draw.choice([f"@{one}" for one in FACTS if f"@{one}" != rest] + ["-"])
    parts[place] = f"{head}{colon}{rest}"
    return " ; ".join(parts)


def default(cell: str, draw: random.Random) -> str:
    """Another default there, or none."""
    known = values.literal(cell) if cell not in ("-", "req", "") else None
    if isinstance(known, bool):
        return str(not known).lower()
    return str(known + 1) if isinstance(known, int | float) else "1" if known is None else "-"


KINDS: dict[str, tuple[int, Callable[[str, random.Random], str]]] = {
    "verdict": (5, verdict),
    "word": (4, word),
    "action": (4, action),
    "default": (2, default),
}


def mutants(draw: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """``(table, kind, line, changed line)``, one after the other."""
    texts = {
        path.stem: path.read_text(encoding="utf-8").splitlines()
        for path in table.TABLES.glob("*.md")
        if path.stem != "words"
    }
    while True:
        name = draw.choice(sorted(texts))
        line = draw.choice(
            [line for line in texts[name] if line.startswith("| ") and not line.startswith(("| key ", "| ("))]
        )
        kind = draw.choice([*KINDS])
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        column, change = KINDS[kind]
        changed = [*cells[:column], change(cells[column], draw), *cells[column + 1 :]]
        if changed != cells and _counts(kind, table._row(line)):
            yield name, kind, line, f"| {' | '.join(changed)} |"


def _counts(kind: str, row: table.Row) -> bool:
    """Whether a change could make a difference: a default of a key that becomes nothing, and what a refused key becomes, do not."""
    if kind == "default":
        return not row.is_pattern and (any(row.actions.values()) or "*" in {*row.verdicts, *row.says})
    return kind != "action" or {*row.verdicts.values()} != {"refused"}


def forget() -> None:
    for cached in (table.load, table.head_of, words._index):
        cached.cache_clear()


def noticed(name: str, tmp_path: Path) -> str | None:
    """Which check fails: ``rules``, ``files``, ``refusals`` or ``page``; None: none."""
    about = {name, "trl"} if name == "transformers" else {"accelerate", "environment"} if name == "env" else {name}
    checks: dict[str, list[Callable[[], Any]]] = {
        "rules": [
            lambda: RULES.test_words_of_a_row_are_ones_that_it_takes(name),
            lambda: RULES.test_what_is_not_kept_has_its_sentence(name),
            lambda: RULES.test_our_keys_exist(name),
            lambda: RULES.test_a_default_is_one_of_the_values_that_a_key_takes(name),
        ],
        "files": [
            lambda path=path: FILES.test_a_file_means_what_its_source_says(path, tmp_path)
            for path in FILES.FILES
            if path.parent.name in about
        ],
        "refusals": [
            lambda case=case: FILES.test_what_would_train_something_else_is_refused_by_its_key(case)
            for case in FILES.refusals()
            if case["base"].partition("/")[0] in about
        ],
        "page": [lambda: _same_page(name)],
    }
    for what, tests in checks.items():
        for test in tests:
            try:
                test()
            except (AssertionError, ConfigError, values.RefusedError, pytest.fail.Exception, *UNFIT):
                return what
    return None


UNFIT = (TypeError, ValueError, LookupError, AttributeError, ZeroDivisionError)  # of a row that says what cannot be


def _same_page(name: str) -> None:
    path = PAGES.PAGES / f"{name}.md"
    assert PAGES.page(name) == path.read_text(encoding="utf-8")


def shares(
    count: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str | None, int], list[str]]:
    tables = tmp_path / "tables"
    shutil.copytree(table.TABLES, tables)
    drawn = mutants(random.Random(seed))
    monkeypatch.setattr(table, "TABLES", tables)
    found: dict[str | None, int] = {}
    alive: list[str] = []
    for _ in range(count):
        name, kind, line, changed = next(drawn)
        page = tables / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(line, changed, 1), encoding="utf-8")
        forget()
        by = noticed(name, tmp_path)
        found[by] = found.get(by, 0) + 1
        alive += [f"{name} {kind}: {changed}"] if by is None else []
        page.write_text(text, encoding="utf-8")
    forget()
    return found, alive


@pytest.fixture(autouse=True)
def tables_as_they_are():
    yield
    forget()


def test_a_changed_cell_is_noticed(tmp_path, monkeypatch):
    _, alive = shares(12, 3, tmp_path, monkeypatch)
    assert len(alive) <= 1, alive


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_of_all_changed_cells_nearly_all_are_noticed(tmp_path, monkeypatch):
    found, alive = shares(COUNT, 0, tmp_path, monkeypatch)
    print(found)
    assert len(alive) <= 0.05 * COUNT, "\n".join(alive)
