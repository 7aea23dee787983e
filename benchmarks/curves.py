"""Measures loss curves of 1, 2 and 4 ranks, and of 4 with tensor parallelism, against one plain process, and the bytes that each rank holds.

    python benchmarks/curves.py --out docs/data/curves.json     # many minutes on 2 cores; `make picture` draws it too

What is trained is what ``shardwise train`` trains without a file: the same model, text, order, clipping and schedule,
through the same functions. Two studies:

* ``fp32``: 300 steps at a learning rate of 3e-4 in micro-batches of 4 samples (so that 4 ranks have one each), equal to
  1e-5 nats per byte at every step;
* ``fp64``: the settings of the demo itself, learning rate 3e-3, in float64, equal to 1e-8 at every step. (In fp32 that
  learning rate is chaotic: rounding alone moves one process 9e-5 away from itself within 500 steps.)

*One plain process* is a loop of a dozen lines on torch alone, with none of Shardwise's parallel code, from the same
first weights. It runs twice, the second time with other micro-batches: how far it is from itself is the noise that no
layout can be below.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardwise.data.loader import Loader
from shardwise.launch import launch_local
from shardwise.parallel import recipe_of
from shardwise.run.build import build_model, build_plain, make_step
from shardwise.run.config import RunConfig, load_config
from shardwise.run.datasets import open_data, vocab_of
from shardwise.run.memory import memory_of
from shardwise.run.optim import make_optimizer, make_scheduler
from shardwise.state import full_state_dict
from shardwise.world import init

__all__ = ["LAYOUTS", "STUDIES", "Study", "check", "run_plain", "run_rank", "run_study"]

LAYOUTS = {
    "1 rank": (1, "dp_shard=1"),
    "2 ranks": (2, "dp_shard=2"),
    "4 ranks": (4, "dp_shard=4"),
    "4 ranks, tp=2": (4, "dp_shard=2,tp=2"),
}
"""Curve -> number of ranks, layout."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One comparison: what is trained, for how many steps, and how equal the curves must be (nats per byte)."""

    overrides: tuple[str, ...]
    steps: int
    gate: float
    dtype: torch.dtype
    other_micro_batch: int

    def config(self) -> RunConfig:
        """The whole run; a curve may stop before its end, on the schedule of the whole."""
        return load_config(None, list(self.overrides)).config


STUDIES = {
    "fp32": Study(
        overrides=("--optim.lr=3e-4", "--train.steps=300", "--data.micro_batch=4"),
        steps=300,
        gate=1e-5,
        dtype=torch.float32,
        other_micro_batch=16,
    ),
    "fp64": Study(
        overrides=("--parallel.precision=fp64",), steps=500, gate=1e-8, dtype=torch.float64, other_micro_batch=4
    ),
}


# ---- one curve -----------------------------------------------------------------------------------------------------


def run_rank(layout: str, config: bytes, steps: int) -> dict[str, Any]:
    """Trains on this rank of a layout. Every rank returns its losses and bytes, rank 0 its first weights."""
    run = msgspec.json.decode(config, type=RunConfig)
    with init(layout, device="cpu", seed=run.train.seed) as world:
        model = build_model(run, world)
        step = make_step(run, model)
        first = full_state_dict(model)
        losses = [step(window).loss for window in _windows(run, world, steps)]
        use = memory_of(model, step.optim)
        return {
            "losses": losses,
            "first": first,
            # A gradient is held for each trained parameter between backward and the step.
            "bytes": {"parameters": use.params, "gradients": use.params, "optimizer state": use.optim},
            "planned": recipe_of(model).at(world.rank).num_bytes(),
        }


def run_plain(config: bytes, first: dict[str, Tensor], dtype: torch.dtype, steps: int) -> list[float]:
    """The same training in one process by torch alone: the losses of its steps."""
    run = msgspec.json.decode(config, type=RunConfig)
    model = build_plain(run).to(dtype)
    model.load_state_dict(first)
    optim = make_optimizer(run.optim, model)
    scheduler = make_scheduler(run.schedule, optim, run.train.steps)
    alone = SimpleNamespace(
        seed=run.train.seed, device=torch.device("cpu"), axis=lambda name: SimpleNamespace(rank=0, size=1)
    )
    losses = []
    for window in _windows(run, alone, steps):
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        total = 0.0
        for batch in window:
            logits = model(batch["input_ids"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            (loss / tokens).backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), run.train.max_grad_norm or math.inf)
        optim.step()
        scheduler.step()
        optim.zero_grad()
        losses.append(total / tokens)
    return losses


def _windows(run: RunConfig, world: Any, steps: int) -> Any:
    """The first ``steps`` windows, epoch after epoch."""
    data = run.data
    corpus = open_data(data, vocab=vocab_of(run))
    loader = Loader(corpus.train, world, global_batch=data.global_batch, micro_batch=data.micro_batch)
    done = 0
    while done < steps:
        for window in loader:
            yield window
            done += 1
            if done == steps:
                return


# ---- a study -------------------------------------------------------------------------------------------------------


def run_study(study: Study, steps: int, run: Any = None) -> dict[str, Any]:
    """All curves of a study: losses by name, bytes by name.

    Args:
        study: one of ``STUDIES``.
        steps: at most the study's own.
        run: ``run(function, num_ranks, *args)`` -> results by rank, such as a pool's; default: fresh processes.
    """
    config = study.config()
    text = msgspec.json.encode(config)
    curves: dict[str, list[float]] = {}
    held: dict[str, Any] = {}
    first: dict[str, Tensor] = {}
    for name, (num_ranks, layout) in LAYOUTS.items():
        started = time.perf_counter()
        results = (run or _fresh)(run_rank, num_ranks, layout, text, steps)
        curves[name] = results[0]["losses"]
        held[name] = [result["bytes"] for result in results]
        for rank, result in enumerate(results):
            if result["planned"] != result["bytes"]["parameters"]:
                raise SystemExit(f"rank {rank} of {name} holds {result['bytes']}, planned were {result['planned']}")
        first = first or results[0]["first"]
        _say(f"  {name}: {time.perf_counter() - started:.0f} s")
    started = time.perf_counter()
    data = msgspec.structs.replace(config.data, micro_batch=study.other_micro_batch)
    other = msgspec.json.encode(msgspec.structs.replace(config, data=data))
    # In a process of its own like the ranks, so that it has as many threads as they have.
    for name, settings in (("plain", text), ("plain, split otherwise", other)):
        (curves[name],) = (run or _fresh)(run_plain, 1, settings, first, study.dtype, steps)
    _say(f"  one plain process, twice: {time.perf_counter() - started:.0f} s")
    return {"steps": steps, "gate": study.gate, "overrides": list(study.overrides), "curves": curves, "bytes": held}


def check(result: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each curve to the plain process.

    Raises:
        SystemExit: a layout is further off than the study's gate.
    """
    plain = result["curves"]["plain"]
    worst = {}
    for name, losses in result["curves"].items():
        gaps = [abs(a - b) for a, b in zip(losses, plain, strict=True)]
        worst[name] = math.nan if any(map(math.isnan, gaps)) else max(gaps)  # max() passes over a nan
    for name in LAYOUTS:
        if not worst[name] <= result["gate"]:
            raise SystemExit(f"{name}: {worst[name]:.1e} off, allowed: {result['gate']:.0e}")
    return worst


def _fresh(function: Any, num_ranks: int, *args: Any) -> list[Any]:
    return launch_local(f"{Path(__file__).resolve()}:{function.__name__}", nproc=num_ranks, args=args)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the studies, checks them and writes the numbers. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--steps", type=int, help="stop every curve after so many (each study has its own number)")
    parser.add_argument("--study", choices=list(STUDIES), action="append", help="only this one; may be repeated")
    args = parser.parse_args(argv)
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for name in args.study or STUDIES:
        study = STUDIES[name]
        steps = min(study.steps, args.steps or study.steps)
        _say(f"{name}: {steps} steps, {' '.join(study.overrides)}")
        found[name] = run_study(study, steps)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
        for curve, worst in check(found[name]).items():
            print(f"{name}: {curve}: at most {worst:.1e} nats/byte from one plain process over {steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
