"""Time of a training step in this tree relative to an older commit, each as a ratio to plain torch in the same run.

    python tools/compare_steps.py                       # against the commit of tools/replay.py; most of an hour on 2 cores
    python tools/compare_steps.py --base HEAD~3 --times 5

Both trees run their own ``benchmarks/step.py``, in turns. In it, Shardwise and FSDP2 (or DDP) by hand take steps in the same processes, after
their numbers were found equal, so the ratio of the two is what remains when the machine is busy with other things. Printed are the medians
of those ratios over the turns, for wall time and for time on the cores.

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

__all__ = ["main", "ratios_of"]

_KEEPS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)}

Ratios = dict[tuple[str, str], tuple[float, float]]
"""Model and contender -> ratios to plain torch: of wall time, of time on the cores."""


def ratios_of(table: str) -> Ratios:
    """The ratios in a table that ``benchmarks/step.py`` prints, from its milliseconds, which have more digits."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    times = {(row[0], row[1]): (float(row[2]), float(row[5])) for row in rows if row[0] != "model"}
    plain = {model: spent for (model, name), spent in times.items() if name.endswith("by hand, AdamW(fused=True)")}
    return {key: (spent[0] / plain[key[0]][0], spent[1] / plain[key[0]][1]) for key, spent in times.items()}


def _measure(tree: Path, rounds: int, part: str, models: list[str]) -> Ratios:
    command = [sys.executable, "benchmarks/step.py", "--part", part, "--rounds", str(rounds)]
    command += [word for model in models for word in ("--model", model)]
    env = {**os.environ, **_KEEPS_FREED_MEMORY, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return ratios_of(done.stdout)


def table(base: list[Ratios], now: list[Ratios]) -> str:
    """A Markdown table of medians over the turns: the older commit, this tree, and one over the other."""
    lines = [
        "| model | step | before | now | now / before | before, cores | now, cores | now / before |",
        "|---|---|" + "--:|" * 6,
    ]
    for key in now[0]:
        if key not in base[0] or not key[1].startswith("Shardwise"):
            continue
        cells = []
        for kind in (0, 1):
            before, after = (statistics.median(found[key][kind] for found in side) for side in (base, now))
            cells += [f"{before:.3f}", f"{after:.3f}", f"{after / before:.3f}"]
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
            sides: dict[Path, list[Ratios]] = {tree: [], ROOT: []}
            for turn in range(args.times):
                for side in (tree, ROOT) if turn % 2 else (ROOT, tree):
                    sides[side].append(_measure(side, args.rounds, part, args.model))
            print(table(sides[tree], sides[ROOT]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
