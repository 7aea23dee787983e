"""Runs every mistake of tests/mistakes in plain torch and with Shardwise, and writes the results to docs/mistakes.md.

python tools/mistakes_page.py                  # about a minute on 2 cores
python tools/mistakes_page.py --only LabelsNotShifted MeanOnEachRank     # the other rows are kept
python tools/mistakes_page.py --print          # only prints
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from conftest import PRELOAD  # noqa: E402
from mistakes.rows import THEMES, cells, measure, read_page, row_of, rows  # noqa: E402
from stamp import stamped  # noqa: E402

from shardwise.testing import RankPool  # noqa: E402

PAGE = ROOT / "docs" / "mistakes.md"
HEAD = """# Mistakes that plain PyTorch takes without a word

Written by `python tools/mistakes_page.py`. Each row is two scripts as a user would write them, in `tests/mistakes`: in plain torch, its DDP or
FSDP2, or transformers, where the mistake passes without an error or a warning, and what it costs is measured; and the same with Shardwise.
Measured on the CPU (gloo), on one or two ranks, with models of a few hundred parameters: what a mistake costs in your run is another number.
"n off" is the largest difference from what was meant, relative to the largest element. With Shardwise the outcome is found, not declared:

* **refused**: an error of Shardwise, whose first line is shown (why, and what to change, follow there);
* **warned**: a warning of Shardwise;
* **right**: the numbers are those of one process in float64, within what is said; or those of the other ranks, where a row says so.

Anything else fails the row's test: `make test ARGS="tests/mistakes -k NAME"` runs the one that the last column names. So the rows are mistakes
that are noticed, not all there are. Known ones that pass here too: what [the proof of `tp`](tensor-parallel.md#what-the-proof-does-not-see) and
[windows that are not watched](training.md#what-is-watched) do not see, [random writes](training.md#random-numbers-of-parameters) to replicas in mid-run,
random numbers of [a generator elsewhere](training.md#random-numbers-and-dropout). Other ways in which sharded training goes wrong: [known traps](traps.md).
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the rows, and write nothing")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="run these only; the other rows stay as the page has them"
    )
    given = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() and given.only else ""
    shown = read_page(before)
    with RankPool(preload=PRELOAD) as pool:
        for name in given.only or rows():
            plain, ours = measure(pool.run, name)
            assert ours.kind != "silent", f"{name}: {ours.text}"
            shown[name] = cells(name, plain, ours)
            print(" | ".join((name, *shown[name])), flush=True)
    if not given.print:
        PAGE.write_text(stamped("docs/mistakes.md", _page(shown), kept=before or None), encoding="utf-8")
    return 0


def _page(shown: dict[str, tuple[str, str, str]]) -> str:
    kinds = [shown[name][2].partition(":")[0] for name in rows()]
    counted = ", ".join(f"{kind} {kinds.count(kind)}" for kind in ("refused", "warned", "right"))
    lines = [HEAD, f"**{len(kinds)} mistakes: {counted}.**"]
    for module, heading in THEMES.items():
        names = [name for name in rows() if row_of(name).__module__ == f"mistakes.{module}"]
        if names:
            lines += [
                "",
                f"## {heading}",
                "",
                "| mistake | what plain torch does | what Shardwise does | test |",
                "|---|---|---|---|",
            ]
            lines += [f"| {' | '.join(shown[name])} | `{name}` |" for name in names]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
