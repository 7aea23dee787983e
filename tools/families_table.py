"""Compares every family of tests/families.py with one process and writes the outcome to docs/families.md.

python tools/families_table.py                 # all of them: about 10 minutes on 2 cores
python tools/families_table.py --case mamba    # some, printed only
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import transformers  # noqa: E402
from families import FAMILIES, PARITY_LAYOUTS, Family, constructed, seeded_values, unlike  # noqa: E402
from matrix import LAYOUTS  # noqa: E402
from parallel.on_ranks import same, whole  # noqa: E402

from shardwise.errors import ShardwiseError  # noqa: E402
from shardwise.testing import RankPool  # noqa: E402

TABLE = ROOT / "docs" / "families.md"
HEAD = f"""# Families of transformers, measured

Written by `python tools/families_table.py`, with transformers {transformers.__version__}. Every model is built from a tiny configuration,
unmodified, dropout off.

*Errors* are the largest against one plain process in float64, over loss, every gradient, the gradient norm and every
updated parameter after each of 3 steps: three micro-batches per rank with unequal counts, clipping on, every block a unit
(`min_unit_bytes=0`). The gate is 1e-12, or 8 times the oracle's own rounding noise where that is larger
(see [parity](parity.md)). *Units* are those of `fsdp-2`; 1 means that no list of blocks is entered alike by every rank, and the
whole model is gathered at once: OPT, BART and Whisper
draw at random which blocks they skip (layer drop, also at a rate of 0), the
blocks of LLaVA stand behind a lookup that is not followed, and ALBERT has a single block.

*Init* is how a callable's values are made. `seeded`: every parameter and buffer was written, is the same to the bit
on one rank and on two (FSDP and DDP), and is the constructor's where nothing is drawn; what is drawn has the constructor's mean, spread and extent.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(FAMILIES), help="these only; the other rows are kept")
    names = parser.parse_args().case or list(FAMILIES)
    failures: list[str] = []
    start = time.monotonic()
    with RankPool(preload=("torch", "torch.distributed.fsdp", "shardwise.verify", "families", *_code(names))) as pool:
        for name in names:
            family = FAMILIES[name]
            cells, units, faults = _errors(pool, family)
            how, more = _init(pool, family)
            failures += [f"{name}: {text}" for text in (*faults, *more)]
            row = f"| {name} | {family.kind} | `{family.model}` | {family.hard} | {units} | {cells} | {how} |"
            print(f"{row}  {time.monotonic() - start:.0f} s, {len(failures)} failed", flush=True)
            _write(name, row)
    print(*failures, sep="\n")
    return 1 if failures else 0


def _write(name: str, row: str) -> None:
    """Puts one row in its place; those that are there already stay."""
    kept = {}
    if TABLE.exists():
        kept = {
            line.split(" | ")[0].removeprefix("| "): line
            for line in TABLE.read_text().splitlines()
            if line.startswith("| ")
        }
    kept[name] = row
    rows = [kept[family] for family in FAMILIES if family in kept]
    head = ["family", "kind", "class", "what makes it hard", "units", *PARITY_LAYOUTS, "init"]
    text = "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])
    TABLE.write_text(f"{HEAD}{text}\n\n{len(rows)} families.\n")


def _code(names: list[str]) -> list[str]:
    """The modules of the families' classes: imported once, not by every rank."""
    return sorted({getattr(transformers, FAMILIES[name].model).__module__ for name in names})


def _errors(pool: RankPool, family: Family) -> tuple[str, str, list[str]]:
    """The cells of the layouts, the number of units, and what failed."""
    cells, faults, units = [], [], "-"
    for layout in PARITY_LAYOUTS:
        try:
            report = family.compare(pool.run, layout)
            cells.append(f"{report.err:.1e}")
            units = str(report.num_units) if layout == "fsdp-2" else units
        except ShardwiseError as error:
            faults.append(f"{layout}: {error}")
            cells.append(f"**{type(error).__name__}**")
    return " | ".join(cells), units, faults


def _init(pool: RankPool, family: Family) -> tuple[str, list[str]]:
    """How values are made, and what is wrong with them."""
    theirs, others = constructed(family.case.build, 0), constructed(family.case.build, 1)
    shapes = {key: tuple(tensor.shape) for key, tensor in theirs.items()}
    found, told = {}, []
    try:
        for layout in ("one", "fsdp-2", "ddp-2"):
            text, num_ranks, engine = LAYOUTS[layout]
            answers = pool.run(seeded_values, num_ranks, family.name, text, engine, timeout_s=100)
            found[layout] = whole([held for held, *_ in answers], shapes)
            told = answers[0][2]
    except ShardwiseError as error:
        return f"**{type(error).__name__}**", [f"init: {error}"]
    faults = [f"{layout}: other values than one rank's" for layout in found if not same(found["one"], found[layout])]
    faults += unlike(found["one"], theirs, others)
    return "**wrong**" if faults else "rank 0" if told else "seeded", faults


if __name__ == "__main__":
    sys.exit(main())
