"""Damages checkpoints in many ways, and writes how Shardwise and torch DCP load them to docs/hostile-table.md.

    python tools/hostile_table.py                   # 40 of each kind: some minutes on 2 cores
    python tools/hostile_table.py --num 5 --print   # fewer, and only printed

The seed is printed, and is in the table; the same seed makes the same damage.
"""

import argparse
import importlib.metadata
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tools")]

from conftest import PRELOAD  # noqa: E402
from stamp import stamped  # noqa: E402
from state.mutant_checkpoints import KINDS  # noqa: E402
from state.mutant_dcp import DCP_KINDS, OUTCOMES, dcp_outcomes, saved_both  # noqa: E402
from state.test_checkpoint_hostile import outcomes  # noqa: E402

from shardwise.testing import RankPool  # noqa: E402

TABLE = ROOT / "docs" / "hostile-table.md"
HEAD = """# Damaged checkpoints, measured

Written by `python tools/hostile_table.py`. The same run is saved by Shardwise and, of the same model and optimizer, by `torch.distributed.checkpoint`
of torch {torch}; copies are damaged, {num} of each kind, from seed {seed}, and each is loaded. *Refused* is an error before anything of the run
changes, which names the file or the directory, and no code is run. Of torch: *refused* is any error; *the same* is loaded with the values that were saved;
*other values* is loaded without a word with values that are not those. Damage that has no counterpart there is marked by a dash.
The tensors are small, so that there a stretch of bytes mostly meets what lies around values, which is read as a pickle or an archive.
"Forged" is made with fresh checksums, by somebody who knows the format; stock DCP compares none. What a [checkpoint](checkpoint.md) is.

"""


def measure(
    run: Callable[..., list], num: int, seed: int, folder: Path
) -> tuple[Mapping[str, Counter[str]], Mapping[str, Counter[str]]]:
    """Kind -> how often each came: of Shardwise ("refused", or what is wrong), and of torch (``OUTCOMES``)."""
    run(saved_both, 2, "dp_shard=2", str(folder / "good"), timeout_s=300)
    good = str(folder / "good")
    ours = run(outcomes, 1, good, str(folder / "ours"), list(KINDS), num, seed, timeout_s=3000)[0]
    theirs = run(dcp_outcomes, 1, good, str(folder / "dcp"), list(DCP_KINDS), num, seed, timeout_s=3000)[0]
    return _counted(ours), _counted(theirs)


def _counted(told: Mapping[str, list[str]]) -> dict[str, Counter[str]]:
    return {kind: Counter(found) for kind, found in told.items()}


def table(ours: Mapping[str, Counter[str]], theirs: Mapping[str, Counter[str]]) -> str:
    """The rows, in the order of the kinds."""
    lines = [
        "| damage | Shardwise: refused | " + " | ".join(f"DCP: {name}" for name in OUTCOMES) + " |",
        "|---|--:" + "|--:" * len(OUTCOMES) + "|",
    ]
    for kind in KINDS:
        cells = [f"{ours[kind]['refused']} of {ours[kind].total()}"]
        cells += [str(theirs[kind][name]) for name in OUTCOMES] if kind in theirs else ["-"] * len(OUTCOMES)
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures and writes. Returns the exit status: 1 if Shardwise has let anything pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=40, help="of each kind (40)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="what the damage is drawn from")
    parser.add_argument("--print", action="store_true", help="print the table, and write nothing")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with RankPool(preload=PRELOAD) as pool, tempfile.TemporaryDirectory() as folder:
        ours, theirs = measure(pool.run, given.num, given.seed, Path(folder))
    text = table(ours, theirs)
    passed = {kind: found for kind, found in ours.items() if set(found) != {"refused"}}
    print(text, *passed.items(), sep="\n")
    if not given.print:
        head = HEAD.format(torch=importlib.metadata.version("torch"), num=given.num, seed=given.seed)
        TABLE.write_text(stamped("docs/hostile-table.md", head + text), encoding="utf-8")
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
