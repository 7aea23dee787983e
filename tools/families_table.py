"""Compares every model of tests/verify/test_families.py with one process, and writes the results to docs/families.md.

python tools/families_table.py                 # all of them: about 15 minutes on 2 cores
python tools/families_table.py --case mamba    # only some; the other rows are kept
"""

import argparse
import importlib.metadata
import inspect
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tools")]

import models  # noqa: E402
from layouts import FOREIGN  # noqa: E402
from models import Model  # noqa: E402
from parallel.values import value_faults  # noqa: E402
from stamp import stamped  # noqa: E402
from verify.held import compare  # noqa: E402

from shardwise.errors import ShardwiseError  # noqa: E402
from shardwise.testing import RankPool  # noqa: E402

PAGE = "docs/families.md"
TABLE = ROOT / PAGE
HEAD = """# Models that nobody here wrote, measured

Written by `python tools/families_table.py`. Nothing is changed in any of these models: they are built from a small configuration,
with dropout off (its masks are not one process's). Each is a test: `make soak`, `tests/verify/test_families.py`.

*Errors* are the largest against one plain process in float64, over loss, every gradient, the gradient norm, every
buffer and every updated parameter after each of 3 steps: three micro-batches per rank with unequal counts, clipping on, every block a
unit (`min_unit_bytes=0`). The gate is 1e-12, or 8 times the oracle's own rounding noise where that is larger
(see [parity](parity.md)); an error above 1e-12 has the name of its tensor beside it: the gradient of a bias before a batch
norm, for one, is zero in exact arithmetic, so all its digits are rounding. *Batch norm* normalises each micro-batch by
itself, in one process as on many ranks, so loss and gradients are the same too. Its running statistics are equal on all
ranks, but not those of one process, which saw all the micro-batches one after another: `Sharding(buffers=...)` takes
rank 0's, or their mean.

*Units* are those of `fsdp-2`, and as many gradients are reduced per step; 1 means that the whole model is gathered at once. Where a
name stands beside the number, the units were named (`Sharding(units=...)`), because they are not found.

*Init* is how a callable's values are made. `seeded`: every parameter and buffer was written, is the same to the bit
on one rank and on two (FSDP and DDP), and is the constructor's where nothing is drawn; what is drawn has the constructor's
mean, spread and extent. `rank 0`: the same, but the constructor cannot be replayed, so that rank 0's values are sent
(see [init](init.md)).
"""


@dataclass(frozen=True)
class Section:
    """A table of the page: its models, what is said of them, and its own columns."""

    title: str
    text: str
    models: dict[str, Model]
    columns: tuple[str, ...]

    def own_cells(self, model: Model) -> list[str]:
        cells = {
            "family": model.name,
            "model": model.name,
            "kind": model.kind,
            "package": f"{model.package} {_version(model.package)}",
            "class": f"`{model.model}`",
            "file": f"`{_file_of(model)}`",
            "what makes it hard": model.hard,
        }
        return [cells[column] for column in self.columns]


def _version(package: str) -> str:
    return importlib.metadata.version(package) if package else ""


def _file_of(model: Model) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Path(inspect.getfile(type(model.build()))).name


SECTIONS = (
    Section(
        "Packages",
        "Imported from what `pip install` brings, of packages that know nothing of Shardwise. \n"
        "iTransformer: its constructor draws from Python's `random`, hence rank 0's values.",
        models.select("package"),
        ("model", "kind", "package", "class", "what makes it hard"),
    ),
    Section(
        "As users write them",
        "Scripts in the folder `tests/models/handwritten`, as they are found in repositories and tutorials.",
        models.select("handwritten"),
        ("model", "kind", "file", "class", "what makes it hard"),
    ),
    Section(
        "Transformers",
        f"Families of transformers {_version('transformers')}. ALBERT has a single block, which is run three times.",
        models.select("foreign", "transformers"),
        ("family", "kind", "class", "what makes it hard"),
    ),
)


def main() -> int:
    everything = {name for section in SECTIONS for name in section.models}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=sorted(everything), help="these only; the other rows are kept")
    names = set(parser.parse_args().case or everything)
    failures: list[str] = []
    start = time.monotonic()
    with RankPool(preload=("torch", "torch.distributed.fsdp", "shardwise.verify", *_code(names))) as pool:
        for section in SECTIONS:
            for name in (name for name in section.models if name in names):
                row, faults = _measured(pool, section, section.models[name])
                failures += faults
                print(f"{row}  {time.monotonic() - start:.0f} s, {len(failures)} failed", flush=True)
                _write(name, row)
    if names == everything:
        TABLE.write_text(
            stamped(PAGE, TABLE.read_text(encoding="utf-8").rpartition("\nMeasured at")[0]), encoding="utf-8"
        )
    print(*failures, sep="\n")
    return 1 if failures else 0


def _measured(pool: RankPool, section: Section, model: Model) -> tuple[str, list[str]]:
    """A model's row, and what failed."""
    cells, units, faults = _errors(pool, model)
    try:
        how, more = value_faults(model, pool.run)
    except ShardwiseError as error:
        how, more = f"**{type(error).__name__}**", [f"init: {error}"]
    cells = [*section.own_cells(model), units, *cells, "**wrong**" if more else how]
    return f"| {' | '.join(cells)} |", [f"{model.name}: {text}" for text in (*faults, *more)]


def _errors(pool: RankPool, model: Model) -> tuple[list[str], str, list[str]]:
    """The cells of the layouts, the number of units, and what failed."""
    cells, faults, units = [], [], "-"
    for layout in FOREIGN:
        try:
            report = compare(model, pool.run, layout)
        except (ShardwiseError, AssertionError) as error:
            faults.append(f"{layout}: {error}")
            cells.append(f"**{type(error).__name__}**")
            continue
        worst = max(report.worst.values(), key=lambda difference: difference.err)
        cells.append(f"{worst.err:.1e}" + (f" ({worst.name})" if worst.err > 1e-12 else ""))
        units = str(report.num_units) if layout == "fsdp-2" else units
    named = "" if model.units == "auto" else f" ({', '.join(f'`{name}`' for name in model.units)})"
    return cells, units + named, faults


def _write(name: str, row: str) -> None:
    """Puts one row in its place; those that are there already stay."""
    text = TABLE.read_text() if TABLE.exists() else ""
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    kept[name] = row
    parts = [HEAD]
    for section in SECTIONS:
        head = [*section.columns, "units", *FOREIGN, "init"]
        rows = [kept[name] for name in section.models if name in kept]
        table = "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])
        parts.append(f"## {section.title}\n\n{section.text}\n\n{table}\n\n{len(rows)} models.\n")
    TABLE.write_text(stamped(PAGE, "\n".join(parts), kept=text), encoding="utf-8")


def _code(names: set[str]) -> list[str]:
    """The modules of the transformers' classes: imported once, not by every rank."""
    chosen = [model.model for name, model in models.select("foreign", "transformers").items() if name in names]
    if not chosen:
        return []
    import transformers

    return sorted({getattr(transformers, model).__module__ for model in chosen})


if __name__ == "__main__":
    sys.exit(main())
