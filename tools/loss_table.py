"""Runs that lose a peer, by every cause, under every launcher, either rank; writes what was said and when to docs/loss-table.md.

python tools/loss_table.py                   # 10 of each: an hour and more on 2 cores
python tools/loss_table.py --num 1 --print   # fewer, and only printed; --quick leaves out what only takes long
"""

import argparse
import importlib.metadata
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from world.loss_runs import LAUNCHERS, names, run  # noqa: E402
from world.losses import CAUSES, ONLY_SLOW  # noqa: E402
from world.test_losses import lose  # noqa: E402

TABLE = ROOT / "docs" / "loss-table.md"
HEAD = """# Lost ranks, measured

Written by `python tools/loss_table.py` with torch {torch}: runs of 2 ranks, {num} of each kind, on {cores} cores that others used too (load {load:.0f}).
The other rank waits in an exchange of Shardwise, in every second run in a collective of its own. *Said* is the time from the loss to the first
line that names the lost rank: median, and the longest. *Ended* is until the launcher has ended, or the rank that was left where there is none that
ends it (as under `srun`); it includes the end of the interpreter, which takes seconds on a busy machine. What a [lost rank](when-it-stops.md#a-rank-left-or-was-lost) is.

"""
_SHOWN = {"killed": "`kill -9`", "exits": "`os._exit(0)`", "stopped": "SIGSTOP", "caught": "its own exception, caught"}
_SLOW = {
    "lock": "the interpreter's lock is held", "debugger": "`pdb` waits", "compiles": "a compilation", "saves": "a slow save",
    "none": "nothing",
}  # fmt: skip


def _lost_row(cause: str, launcher: str, lost: int, num: int) -> str:
    runs = [lose(cause, lost, launcher, turn % 2 == 1) for turn in range(num)]
    said = [seconds for each in runs if (seconds := each.seconds_to(names(lost))) is not None]
    ends = cause in ("killed", "exits")
    ended = f"{statistics.median(each.seconds_to_end for each in runs):.1f} s" if ends else "goes on"
    left = str(max(each.left for each in runs)) if ends else "-"
    time = f"{statistics.median(said):.1f} s, {max(said):.1f} s" if said else "-"
    return f"| {_SHOWN[cause]} | {launcher} | {lost} | {len(said)} of {num} | {time} | {ended} | {left} |"


def _slow_row(cause: str, launcher: str, lost: int, num: int) -> str:
    runs = [run(cause, lost, launcher, seconds=ONLY_SLOW[cause], timeout_s=300.0) for _ in range(num)]
    alarms = sum(each.text.count("DONE ") != 2 or "RankError" in each.text for each in runs)
    return f"| {_SLOW[cause]} | {ONLY_SLOW[cause]:.0f} s | {launcher} | {lost} | {alarms} of {num} |"


def main() -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=10, help="of each kind (10)")
    parser.add_argument("--quick", action="store_true", help="without what only takes long")
    parser.add_argument("--print", action="store_true", help="print the table, and write nothing")
    given = parser.parse_args()
    lines = ["| cause | launcher | rank | named | said: median, longest | ended | left running |",
             "|---|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    kinds = [(launcher, lost) for launcher in LAUNCHERS for lost in range(2)]
    for row in (_lost_row(cause, *kind, given.num) for cause in CAUSES for kind in kinds):
        print(row, flush=True)
        lines.append(row)
    if not given.quick:
        lines += ["", "No loss, on one of the ranks; what ends a run here is a false alarm:", ""]
        lines += ["| what it does | for | launcher | rank | false alarms |", "|---|--:|---|--:|--:|"]
        for row in (_slow_row(cause, *kind, min(given.num, 2)) for cause in ONLY_SLOW for kind in kinds):
            print(row, flush=True)
            lines.append(row)
    if not given.print:
        head = HEAD.format(
            torch=importlib.metadata.version("torch"), num=given.num, cores=os.cpu_count(), load=os.getloadavg()[2]
        )
        TABLE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
