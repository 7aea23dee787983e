"""Runs training that loses either rank, for every cause and launcher; writes messages and times to docs/loss-table.md.

python tools/loss_table.py                   # 10 of each: an hour and more on 2 cores
python tools/loss_table.py --num 1 --print   # fewer, and only printed; --quick leaves out what only takes long
"""

import argparse
import importlib.metadata
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tools")]

from stamp import stamped  # noqa: E402
from world.loss_runs import LAUNCHERS, Run, names, run  # noqa: E402
from world.losses import CAUSES, ONLY_SLOW  # noqa: E402
from world.test_losses import lose  # noqa: E402

TABLE = ROOT / "docs" / "loss-table.md"
HEAD = """# Lost ranks, measured

Written by `python tools/loss_table.py` with torch {torch}: runs of 2 ranks, {num} of each kind, on {cores} cores, {jobs} runs at the same
time and others beside them (load {load:.0f}).
The other rank waits in an exchange of Shardwise, in every second run (but where the lost one goes on) in a collective of its own. *Said* is the time from the loss to the first
line that names the lost rank: median, and the longest. *Ended* is until the launcher has ended, or the rank that was left where there is none that
ends it (as under `srun`); it includes the end of the interpreter, which takes seconds on a busy machine. What a [lost rank](when-it-stops.md#a-rank-left-or-was-lost) is.

"""
_LOST_HEAD = """| cause | launcher | rank | named | said: median, longest | ended | left running |
|---|---|--:|--:|--:|--:|--:|"""
_SLOW_HEAD = """
No loss, on one of the ranks; what ends a run here is a false alarm:

| what it does | for | launcher | rank | false alarms |
|---|--:|---|--:|--:|"""
_SHOWN = {"killed": "`kill -9`", "exits": "`os._exit(0)`", "stopped": "SIGSTOP", "caught": "its own exception, caught"}
_SLOW = {
    "lock": "the interpreter's lock is held", "debugger": "`pdb` waits", "compiles": "a compilation", "saves": "a slow save",
    "load": "ten busy processes beside it", "none": "nothing",
}  # fmt: skip


def _lost_row(cause: str, launcher: str, lost: int, runs: list[Run]) -> str:
    said = [seconds for each in runs if (seconds := each.seconds_to(names(lost))) is not None]
    ends = cause in ("killed", "exits")
    ended = f"{statistics.median(each.seconds_to_end for each in runs):.1f} s" if ends else "goes on"
    left = str(max(each.left for each in runs)) if ends else "-"
    time = f"{statistics.median(said):.1f} s, {max(said):.1f} s" if said else "-"
    return f"| {_SHOWN[cause]} | {launcher} | {lost} | {len(said)} of {len(runs)} | {time} | {ended} | {left} |"


def _slow_row(cause: str, launcher: str, lost: int, runs: list[Run]) -> str:
    alarms = sum(each.text.count("DONE ") != 2 or "RankError" in each.text for each in runs)
    return f"| {_SLOW[cause]} | {ONLY_SLOW[cause]:.0f} s | {launcher} | {lost} | {alarms} of {len(runs)} |"


def _run(cause: str, launcher: str, lost: int, turn: int) -> Run:
    if cause in CAUSES:
        return lose(cause, lost, launcher, turn % 2 == 1)
    return run(cause, lost, launcher, seconds=ONLY_SLOW[cause], timeout_s=300.0)


def _num(cause: str, num: int) -> int:
    return num if cause in CAUSES else min(num, 2)


def _page(rows: list[str], kept: list[str]) -> str:
    """Both tables: ``rows``, and what is ``kept`` of a page from before for kinds that were not measured now."""
    parts = []
    for head, shown, width in ((_LOST_HEAD, _SHOWN, 3), (_SLOW_HEAD, _SLOW, 4)):
        found = {}
        for row in (*kept, *rows):
            cells = [cell.strip() for cell in row.split("|")[1:-1]]
            if cells and cells[0] in shown.values():
                found[(list(shown.values()).index(cells[0]), *cells[width - 2 : width])] = row
        order = [(i, launcher, str(lost)) for i in range(len(shown)) for launcher in LAUNCHERS for lost in range(2)]
        parts.append("\n".join([head, *(found[key] for key in order if key in found)]))
    return "\n".join(parts) + "\n"


def main() -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=10, help="of each kind (10)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1): times grow with the load")
    parser.add_argument(
        "--cause", action="append", choices=[*CAUSES, *ONLY_SLOW], help="only this one; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="without what only takes long")
    parser.add_argument("--print", action="store_true", help="print the table, and write nothing")
    given = parser.parse_args()
    kinds = [(launcher, lost) for launcher in LAUNCHERS for lost in range(2)]
    causes = [cause for cause in (*CAUSES, *([] if given.quick else ONLY_SLOW)) if cause in (given.cause or [cause])]
    with ThreadPoolExecutor(given.jobs) as pool:
        asked = [
            (cause, *kind, [pool.submit(_run, cause, *kind, turn) for turn in range(_num(cause, given.num))])
            for cause in causes
            for kind in kinds
        ]
        rows = []
        for cause, launcher, lost, runs in asked:
            make = _lost_row if cause in CAUSES else _slow_row
            rows.append(make(cause, launcher, lost, [each.result() for each in runs]))
            print(rows[-1], flush=True)
    if not given.print:
        head = HEAD.format(
            torch=importlib.metadata.version("torch"),
            num=given.num,
            cores=os.cpu_count(),
            jobs=given.jobs,
            load=os.getloadavg()[2],
        )
        before = TABLE.read_text(encoding="utf-8") if given.cause and TABLE.exists() else ""
        if before:  # its head is of the run that made most of the page
            head = before[: before.index(_LOST_HEAD)]
        page = stamped("docs/loss-table.md", head + _page(rows, before.splitlines()), kept=before or None)
        TABLE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
