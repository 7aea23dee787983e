"""Compares all models with one process under all layouts and options, and writes the results to docs/parity-table.md.

    python tools/parity_table.py            # about 20 minutes on 2 cores
    python tools/parity_table.py --sample   # each model under each layout once, the other choices combined pairwise
    python tools/parity_table.py --case odd # one model, printed only

Each cell of the table is the largest error over loss, every gradient, the norm and every updated parameter, over
accumulation 1 and 3, clipping on and off, one unit per block and the default unit size.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tools")]

import models  # noqa: E402
from conftest import PRELOAD  # noqa: E402
from layouts import MATRIX  # noqa: E402
from stamp import stamped  # noqa: E402
from verify.matrix import all_cells, sample_cells  # noqa: E402

from shardwise.errors import ShardwiseError  # noqa: E402
from shardwise.testing import RankPool  # noqa: E402

TABLE = ROOT / "docs" / "parity-table.md"
HEAD = """# Parity, measured

Written by `python tools/parity_table.py{option}`. Largest error against one plain process in float64, over loss, every
gradient, the gradient norm and every updated parameter after each of 3 steps of SGD with momentum; {scope}. The gate is 1e-12, or 8 times
the oracle's own rounding noise where that is larger (a bias before batch norm has a gradient of nothing but rounding).

"""

_WHOLE = "over accumulation 1 and 3 with unequal token counts, clipping on and off, one unit per block and the default unit size"
_SAMPLE = (
    "each cell is one comparison, in which accumulation (1 or 3, with unequal token counts), clipping and the unit size\n"
    "(one per block, or the default) are dealt so that every pair of choices occurs; without `--sample` each cell is all eight"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(models.select("matrix")), help="one model only; nothing is written")
    parser.add_argument("--sample", action="store_true", help="the cells that `make test` runs instead of all")
    given = parser.parse_args()
    only = given.case
    worst: dict[tuple[str, str], float] = {}
    failures: list[str] = []
    start, cells = (
        time.monotonic(),
        [cell for cell in (sample_cells() if given.sample else all_cells()) if only in (None, cell.case)],
    )
    with RankPool(preload=PRELOAD) as pool:
        for i, cell in enumerate(cells, start=1):
            key = (cell.case, cell.layout)
            try:
                report = cell.run(pool.run)
                cell.assert_sharded(report)
                worst[key] = max(worst.get(key, 0.0), report.err)
            except (ShardwiseError, AssertionError) as error:
                failures.append(f"{cell}: {error}")
                worst[key] = float("inf")
            if i % 8 == 0 or i == len(cells):
                print(f"{i}/{len(cells)} {cell} {time.monotonic() - start:.0f} s, {len(failures)} failed", flush=True)
    rows = ["| model | " + " | ".join(MATRIX) + " |", "|---" * (len(MATRIX) + 1) + "|"]
    for case in dict.fromkeys(case for case, _ in worst):
        rows.append(f"| {case} | " + " | ".join(f"{worst[case, layout]:.1e}" for layout in MATRIX) + " |")
    text = "\n".join(rows) + f"\n\n{len(cells)} comparisons, {len(failures)} failed.\n"
    print(text, *failures, sep="\n")
    if only is None:
        option, scope = (" --sample", _SAMPLE) if given.sample else ("", _WHOLE)
        page = HEAD.format(option=option, scope=scope) + text
        TABLE.write_text(stamped("docs/parity-table.md", page), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
