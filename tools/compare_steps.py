"""Time of a training step in this tree relative to an older commit, in turns.

    python tools/compare_steps.py                       # against the commit of tools/replay.py; most of an hour on 2 cores
    python tools/compare_steps.py --base HEAD~3 --times 5

Both trees run their own ``benchmarks/step.py``, one after the other, several times, so that what else the machine does hits both. Printed
are the medians over the turns, for wall time and for time on the cores. What plain torch takes in the same run is printed too: how far its
two times are apart is what the machine did. (A ratio to it would not do: in older commits the contenders by hand run over groups that
Shardwise has made, today over torch's own.)

glibc's allocator is told to keep what is freed. By default it returns large blocks to the system or keeps them depending on what the
process happened to free first: the same code then takes 0 or 25,000 page faults a step, up to 7 % of its time, for the whole run.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from replay import BASE, ROOT, checked_out

__all__ = ["main", "times_of"]

_KEEPS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)}

Times = dict[tuple[str, str], tuple[float, float]]
"""Model and contender -> milliseconds of a step: on the clock, on the cores."""


def times_of(table: str) -> Times:
    """The times in a table that ``benchmarks/step.py`` prints."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    return {(row[0], row[1]): (float(row[2]), float(row[5])) for row in rows if row[0] != "model"}


def _measure(tree: Path, rounds: int, part: str, models: list[str]) -> Times:
    command = [sys.executable, "benchmarks/step.py", "--part", part, "--rounds", str(rounds)]
    command += [word for model in models for word in ("--model", model)]
    env = {**os.environ, **_KEEPS_FREED_MEMORY, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return times_of(done.stdout)


def table(base: list[Times], now: list[Times]) -> str:
    """A Markdown table of medians over the turns: the older commit, this tree, and one over the other."""
    lines = [
        "| model | step | before, ms | now, ms | now / before | before, cores | now, cores | now / before |",
        "|---|---|" + "--:|" * 6,
    ]
    for key in now[0]:
        if key not in base[0] or not key[1].startswith(("Shardwise", "FSDP2", "DDP")):
            continue
        cells = []
        for kind in (0, 1):
            before, after = (statistics.median(found[key][kind] for found in side) for side in (base, now))
            cells += [f"{before:.1f}", f"{after:.1f}", f"{after / before:.3f}"]
        lines.append(f"| {key[0]} | {key[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default=BASE, help=f"the older commit ({BASE})")
    parser.add_argument("--times", type=int, default=3, help="turns of each tree (3)")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each contender in a turn (40)")
    parser.add_argument("--part", choices=("step", "replicas"), action="append", help="only this; may be repeated")
    parser.add_argument("--model", action="append", default=[], help="only this one of step.py; may be repeated")
    args = parser.parse_args(argv)
    with checked_out(args.base) as tree:
        for part in args.part or ("step", "replicas"):
            sides: dict[Path, list[Times]] = {tree: [], ROOT: []}
            for turn in range(args.times):
                for side in (tree, ROOT) if turn % 2 else (ROOT, tree):
                    sides[side].append(_measure(side, args.rounds, part, args.model))
            print(table(sides[tree], sides[ROOT]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
