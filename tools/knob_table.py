"""Runs every option of sharding and of how blocks run, on 2 and 4 ranks, and writes the results to docs/knobs-table.md.

python tools/knob_table.py            # some minutes on 2 cores
python tools/knob_table.py --print    # only prints
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tools")]

from conftest import PRELOAD  # noqa: E402
from stamp import stamped  # noqa: E402
from techniques.knobs import DEVICE_KNOBS, KNOBS  # noqa: E402
from techniques.test_knobs import compare  # noqa: E402

from shardwise.testing import RankPool  # noqa: E402

TABLE = ROOT / "docs" / "knobs-table.md"
HEAD = """# Knobs, measured

Written by `python tools/knob_table.py`. Each setting of [units](units.md) and [remat](remat.md) on the reference model with a unit for each of its
three blocks, windows of several micro-batches: the largest error against one plain process in float64 (loss, every gradient,
the norm, every updated parameter; for settings of precision, and for `fullgraph`, in float32), which a knob that does nothing would pass too; and so what the knob is for, counted on
rank 0 in one window of two micro-batches.

"""
DEVICE_HEAD = "On a CPU torch does nothing with these; seen is what Shardwise asks it for on cuda."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the table, and write nothing")
    given = parser.parse_args()
    rows = ["| setting | layout | largest error | observable | by default | with it |", "|---|---|--:|---|--:|--:|"]
    with RankPool(preload=PRELOAD) as pool:
        for knob in KNOBS:
            for size, layout in knob.layouts.items():
                report = compare(pool.run, size, layout, knob.options, gate=knob.gate, dtype=knob.dtype)
                a, b = (knob.seen(knob.run(pool.run, size, options)[0]) for options in (knob.options, knob.base))
                assert knob.differs(a, b), f"{knob.setting} on {layout}: {a}, by default {b}"
                shown = [" and ".join(map(_word, value if isinstance(value, tuple) else (value,))) for value in (b, a)]
                rows.append(
                    f"| `{knob.setting}` | `{layout}` | {report.err:.1e} | {knob.observable} | {shown[0]} | {shown[1]} |"
                )
                print(rows[-1], flush=True)
    rows += ["", DEVICE_HEAD, "", "| setting | what is asked of torch | by default | with it |", "|---|---|--:|--:|"]
    for each in DEVICE_KNOBS:
        asked, usual = each.seen(each.asked), each.seen(not each.asked)
        assert each.differs(asked, usual), each.setting
        rows.append(f"| `{each.setting}` | {each.observable} | {_word(usual)} | {_word(asked)} |")
        print(rows[-1], flush=True)
    if not given.print:
        TABLE.write_text(stamped("docs/knobs-table.md", HEAD + "\n".join(rows)), encoding="utf-8")
    return 0


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())
