"""Trains every causal language model of the installed transformers under ``tp``, or ``cp``, and compares it with one process.

    python benchmarks/zoo.py --write docs/tp-families-table.md   # all at tp=2, every third on 4 ranks: 20 minutes on 2 cores
    python benchmarks/zoo.py --layout cp=2 --keep cp.jsonl --write docs/cp-families-table.md   # every second on ranks: 20 minutes
    python benchmarks/zoo.py --only llama,gpt2 --layout dp_shard=2,tp=2
    python benchmarks/zoo.py --layout tp=2 --sequence --write docs/sp-families-table.md   # sequence_parallel=True, every third: 15 minutes

Under ``cp`` alone all kinds are proved, on one process, and every second one trains on ranks besides. ``--keep``: a file that gets each
row as it is found; with it a run goes on where another one ended.

A verdict is *proved* (that its sequences may be cut), *equal* (loss, norm, every gradient, every update to 1e-12 in fp64, two micro-batches), *not built* or *not run*
(by one plain process; a property of how it was made small), *refused*, with the reason, or **wrong**. The share is that of
the parameters that a rank holds at most.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# As on the ranks: sums in another order are enough to change what a model of huge gradients (rwkv's, 2000) does next.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(ROOT / "benchmarks"))

import causal_lms  # noqa: E402

import shardwise as sw  # noqa: E402
from shardwise.layout import layout_of, num_ranks_of  # noqa: E402
from shardwise.techniques.cp.probe import proof  # noqa: E402
from shardwise.techniques.technique import Example  # noqa: E402
from shardwise.testing import RankPool  # noqa: E402

__all__ = ["main", "verdict_of"]

SWEEPS = {"tp=2": 1, "tp=4": 3, "dp_shard=2,tp=2": 3}
"""Layout -> of the kinds in order, every so many are run under it."""


OF_STATE = ("mamba", "delta", "rwkv", "conv", "ssm", "recurrent", "linear", "lightning", "xlstm", "mlstm", "kda", "lru")
"""Words in the names of modules, and of their classes, that hold a state, or a window, of tokens."""


def verdict_of(kind: str, layout: str, pool: Any, *, is_run: bool = True, is_sequence: bool = False) -> dict[str, Any]:
    """What came of one kind of model: ``verdict``, ``why`` and, where it ran, ``share`` and ``error``. ``is_run``: on ranks. ``is_sequence``:
    sequences are cut between layers too."""
    options = {"tensor_parallel": sw.TensorParallel(sequence_parallel=True)} if is_sequence else {}
    num_data = 2 if "dp" in layout else 1
    try:
        with most_seconds(30):
            model = causal_lms.build(kind)
    except (Exception, TooLongError) as error:
        return {"verdict": "not built", "why": _line(error)}
    try:
        windows = causal_lms.windows(model, 2, 2 * num_data)
        inputs = {key: value for key, value in windows[0][0].items() if key != "labels"}
        sw.next_token_loss(model(**inputs), windows[0][0]).backward()
    except Exception as error:
        return {"verdict": "not run", "why": _line(error)}
    row: dict[str, Any] = {}
    if layout.startswith("cp="):
        row = proved(model, inputs, layout)
        if row["verdict"] != "proved" or not is_run:
            return row
    whole = 8 * sum(param.numel() for param in model.parameters())
    try:
        report = sw.verify(
            causal_lms.builder(kind),
            layout,
            batches=windows,
            loss=sw.next_token_loss,
            optimizer="sgd",
            run=pool.run,
            **options,
        )
    except sw.VerifyError as error:
        return {"verdict": "wrong", "why": str(error).splitlines()[0]}
    except sw.ShardwiseError as error:
        return {"verdict": "refused", "why": _lines(error)}
    except Exception as error:  # of the plain process, whose numbers are all float64
        return {"verdict": "not run", "why": f"in float64: {_line(error)}"}
    worst = max(found.err for found in report.worst.values())
    why = row.get("why") or ("experts, whole on every rank" if causal_lms.has_experts(model) else "")
    return {"verdict": "equal", "why": why, "share": max(report.bytes_per_rank) / whole, "error": worst}


def proved(model: Any, inputs: dict[str, Any], layout: str) -> dict[str, Any]:
    """What the proof of context parallelism says of a model, with no ranks."""
    try:
        with most_seconds(40):
            found = proof(
                model,
                Example(lambda copy: copy(**inputs)),
                layout_of(layout, num_ranks_of(layout) or 1),
                sw.ContextParallel(),
            )
    except sw.UnsupportedError as error:
        named = dict(model.named_modules()).get(error.name or "")
        words = f"{error.name} {type(named).__name__}".lower()
        is_state = named is not None and any(word in words for word in OF_STATE)
        if named is not None and error.name:  # or a convolution in it
            is_state |= any("conv" in type(child).__name__.lower() for child in named.modules())
        return {"verdict": "refused", "why": _lines(error), "state": is_state}
    except (Exception, TooLongError) as error:
        return {"verdict": "refused", "why": _line(error)}
    facts = found["facts"]
    ways = {
        "positions of its own": facts["positions"],
        "attention written out": {**facts["products"], **facts["keys"]},
        "output whole": facts["output"] == "whole",
    }
    return {"verdict": "proved", "why": ", ".join([found["method"], *(way for way, is_so in ways.items() if is_so)])}


def _lines(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    own = [i for i, line in enumerate(lines) if line.startswith("shardwise.errors.")]  # of a rank, behind its traceback
    return " ".join(
        line.strip().partition("UnsupportedError: ")[2] or line.strip() for line in lines[own[-1] if own else 0 :][:2]
    )


class TooLongError(BaseException):
    """It takes too long. Not an Exception, as code that is run may catch those."""


@contextlib.contextmanager
def most_seconds(seconds: int) -> Iterator[None]:
    """Within: what takes longer raises TimeoutError."""

    def stop(*_: Any) -> None:
        raise TooLongError(f"it takes more than {seconds} s")

    signal.signal(signal.SIGPROF, stop)  # of its own work: other processes may take the cores
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__.strip('_')}: {(str(error).splitlines() or [''])[0]}"[:100]


def table(found: dict[str, dict[str, Any]], layout: str) -> str:
    """A section of a Markdown page: the totals, and a row for each kind."""
    count = Counter(row["verdict"] for row in found.values())
    ran = [row for row in found.values() if row["verdict"] == "equal"]
    good = len(ran) + count["proved"]
    states = sum(bool(row.get("state")) for row in found.values())
    others = good + count["refused"] + count["wrong"] - states
    dense = [row for row in ran if not row["why"]]
    limit = 0.62 if layout.partition(", ")[0] == "tp=2" else 0.43  # on 4 ranks
    held = sum(row["share"] <= limit for row in dense)
    version = importlib.metadata.version("transformers")
    lines = [
        f"## {layout}",
        "",
        f"transformers {version}: {len(found)} kinds of causal language models; "
        + ", ".join(
            f"{count[key]} {key}"
            for key in ("equal", "proved", "refused", "wrong", "not run", "not built")
            if key in count or key != "proved"
        )
        + (
            f". {held} of {len(dense)} that are equal and have no experts hold at most {limit:g} of the parameters on a rank "
            f"({held / max(len(dense), 1):.0%})."
            if "tp" in layout
            else f". {good} of {states + others} that run are cut without a fallback ({good / max(states + others, 1):.0%}); of "
            f"the others {states} hold a state, or a window, of tokens in modules that are named, which is no attention: of those without "
            f"such modules {good / max(others, 1):.0%} are cut."
        ),
        "",
        "| model | verdict | share per rank | largest error | |",
        "|---|---|--:|--:|---|",
    ]
    for kind, row in found.items():
        share = f"{row['share']:.2f}" if "share" in row else ""
        error = f"{row['error']:.0e}" if "error" in row else ""
        why = row["why"].replace("|", "/")
        lines.append(f"| {kind} | {row['verdict']} | {share} | {error} | {why} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Compares and prints. Returns 1 if a model is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", help=f"one layout of the ranks ({', '.join(SWEEPS)})")
    parser.add_argument("--only", help="only these kinds, with commas")
    parser.add_argument(
        "--every", type=int, help="only every so many of the kinds (1; 3 on 4 ranks, or with --sequence)"
    )
    parser.add_argument("--sequence", action="store_true", help="TensorParallel(sequence_parallel=True)")
    parser.add_argument("--keep", type=Path, help="a file of rows, which are not found again")
    parser.add_argument("--write", type=Path, help="a page that gets the tables")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    sections, is_wrong = [], False
    with RankPool(preload=["transformers"]) as pool:
        for layout in [args.layout] if args.layout else SWEEPS:
            every = args.every or (3 if args.sequence else 1 if args.layout else SWEEPS[layout])
            kinds = args.only.split(",") if args.only else causal_lms.names()[::every]
            found = {
                kind: _kept(
                    kind,
                    layout,
                    pool,
                    args.keep,
                    is_run=bool(args.only) or not causal_lms.names().index(kind) % 2,
                    is_sequence=args.sequence,
                )
                for kind in kinds
            }
            sections.append(table(found, layout + ", sequence_parallel=True" * args.sequence))
            print(sections[-1], flush=True)
            is_wrong |= any(row["verdict"] == "wrong" for row in found.values())
    if args.write:
        axis = "cp" if args.layout and "cp" in args.layout else "tp"
        also = " with sequence parallelism" if args.sequence else ""
        args.write.write_text(
            f"# Causal language models under {axis}{also}\n\n" + "\n".join(sections), encoding="utf-8"
        )
    return int(is_wrong)


def _kept(kind: str, layout: str, pool: Any, keep: Path | None, *, is_run: bool, is_sequence: bool) -> dict[str, Any]:
    """The verdict of one kind, of an earlier run or of now."""
    key = f"{layout} sequence" if is_sequence else layout
    lines = keep.read_text(encoding="utf-8").splitlines() if keep is not None and keep.exists() else []
    for line in lines:
        if (row := json.loads(line))["kind"] == kind and row["layout"] == key:
            return dict(row)
    row = {"kind": kind, "layout": key, **_shown(kind, layout, pool, is_run=is_run, is_sequence=is_sequence)}
    if keep is not None:
        with keep.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


def _shown(kind: str, layout: str, pool: Any, *, is_run: bool, is_sequence: bool) -> dict[str, Any]:
    """The verdict of one kind, which is printed."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        row = verdict_of(kind, layout, pool, is_run=is_run, is_sequence=is_sequence)
    shown = f"{row['share']:.2f} {row['error']:.0e}" if "share" in row else row["why"]
    seconds = time.perf_counter() - start
    print(f"{kind} {layout}: {row['verdict']} {shown} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
