"""Says of every model of the tests that is none of transformers whether its sequences may be cut over cp, and why not.

    python benchmarks/context_modules.py                                 # prints the table: two minutes
    python benchmarks/context_modules.py --write docs/cp-modules-table.md

Only the proof is run, on one process. A module that holds no sequences, or no list of blocks, is refused too, by name.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from models import MODELS, Model  # noqa: E402
from zoo import TooLongError, most_seconds  # noqa: E402

import shardwise as sw  # noqa: E402
from shardwise.layout import layout_of  # noqa: E402
from shardwise.techniques.cp.probe import proof  # noqa: E402
from shardwise.techniques.technique import Example  # noqa: E402

__all__ = ["main"]


def verdict_of(record: Model) -> tuple[str, str]:
    """``cut``, or what refused it, and more of it."""
    try:
        torch.manual_seed(0)
        model = record.build().double()
        batch = record.windows(1, 1)[0][0]
        with torch.no_grad():
            record.forward(model, batch)
    except Exception as error:
        return "not run", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
    example = Example(lambda copy: record.forward(copy, batch))
    try:
        with most_seconds(20):
            found = proof(model, example, layout_of("cp=2", 2), sw.ContextParallel())
    except TooLongError as error:
        return "refused", str(error)
    except sw.ShardwiseError as error:
        words = str(error).partition("why: ")[2].partition("fix: ")[0].split()
        return f"refused: `{error.name}`" if error.name else "refused", " ".join(words)[:170]
    facts = found["facts"]
    ways = ["written out"] * bool(facts["products"] or facts["keys"]) + ["positions"] * bool(facts["positions"])
    return "cut", ", ".join([found["method"], *ways, *["output whole"] * (facts["output"] == "whole")])


def table() -> str:
    """A row for each model."""
    rows = {
        name: (record, *verdict_of(record))
        for name, record in MODELS.items()
        if record.batch is not None and "transformers" not in record.tags and record.package != "transformers"
    }
    num_cut = sum(verdict == "cut" for _, verdict, _ in rows.values())
    lines = [
        "# Modules that are not of transformers, under cp=2",
        "",
        f"Written by `python benchmarks/context_modules.py --write docs/cp-modules-table.md`. Of {len(rows)} models of the tests the sequences of {num_cut} may be "
        "cut; the others are refused, by the module that mixes positions or by what they lack.",
        "",
        "| model | kind | what makes it hard | verdict | |",
        "|---|---|---|---|---|",
    ]
    for name, (record, verdict, why) in rows.items():
        lines.append(
            "| " + " | ".join(x.replace("|", "/") for x in (name, record.kind, record.hard, verdict, why)) + " |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page that gets the table")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    text = table()
    print(text)
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
