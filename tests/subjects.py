"""What a model that nobody here wrote is held to: one process's numbers, and its constructor's values, under every layout."""

import functools
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matrix import LAYOUTS
from parallel.on_ranks import same, whole
from torch import Tensor, nn
from zoo import Case

from shardwise import Sharding
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.parallel.init.sources import all_tensors
from shardwise.verify import Report, verify
from shardwise.world import init

__all__ = ["PARITY_LAYOUTS", "VALUE_LAYOUTS", "Subject", "unlike"]

PARITY_LAYOUTS = ("fsdp-2", "ddp-2", "hsdp-2x2")
VALUE_LAYOUTS = ("one", "fsdp-2", "ddp-2")


@dataclass(frozen=True)
class Subject:
    """A model, the class it is of, and why it is here.

    Attributes:
        case: how to build it, what it eats, its loss.
        kind: what it is for, in a word or two.
        model: the name of its class.
        hard: what makes it hard.
        package: the installed package it is imported from; "" = written in tests/handwritten.
        units: as ``Sharding`` takes it, where the code of a forward cannot be read, or names blocks in its own way.
    """

    case: Case
    kind: str
    model: str
    hard: str
    package: str = "transformers"
    units: Any = "auto"

    @property
    def name(self) -> str:
        return self.case.name

    def compare(self, run: Callable[..., Any], layout: str) -> Report:
        """Three steps, three micro-batches per rank with unequal counts, clipped, every block a unit.

        Raises:
            VerifyError: the first tensor that differs.
            AssertionError: it was never sharded, which would make it equal too.
        """
        text, num_ranks, engine = LAYOUTS[layout]
        report = verify(
            self.case.build,
            text,
            batches=self.case.windows(3, 3 * num_ranks),
            loss=self.case.loss,
            count=self.case.count,
            forward=self.case.forward,
            max_grad_norm=0.5,
            sharding=Sharding(engine=engine, min_unit_bytes=0) if layout == "ddp-2" else self._sharding(engine),
            run=run,
        )
        counts = report.collectives
        if report.engine == "ddp":
            assert counts.get("allreduce", 0) >= 3 and "_reduce_scatter_base" not in counts, counts
        else:
            assert counts["_reduce_scatter_base"] == report.num_units, (counts, report.num_units)
            assert max(report.bytes_per_rank) < sum(report.bytes_per_rank)
        assert (report.engine == "ddp") == (layout == "ddp-2") and report.num_steps == 3
        return report

    def _sharding(self, engine: str) -> Sharding:
        """The smallest units there are."""
        if self.units != "auto":
            return Sharding(engine=engine, units=self.units)  # each is one, whatever its size
        return Sharding(engine=engine, min_unit_bytes=0)

    def values(self, run: Callable[..., Any], layout: str) -> tuple[dict[str, Tensor], list[str]]:
        """The whole tensors that ranks make of the callable, and what they warned of their init."""
        text, num_ranks, engine = LAYOUTS[layout]
        answers = run(_seeded, num_ranks, self.case.build, text, engine, timeout_s=100)
        shapes = {key: tuple(tensor.shape) for key, tensor in self.constructed(0).items()}
        return whole([held for held, _ in answers], shapes), answers[0][1]

    def constructed(self, seed: int) -> dict[str, Tensor]:
        """Every tensor of the constructor's own, in this process."""
        return _constructed(self.case.build, seed)

    def value_faults(self, run: Callable[..., Any]) -> tuple[str, list[str]]:
        """How a callable's values are made ("seeded" or "rank 0"), and what is wrong with them under any layout."""
        made = {layout: self.values(run, layout) for layout in VALUE_LAYOUTS}
        alone = made["one"][0]
        faults = [f"{layout}: other values than one rank's" for layout in made if not same(alone, made[layout][0])]
        faults += unlike(alone, *(self.constructed(seed) for seed in range(8)))
        return "rank 0" if any(told for _, told in made.values()) else "seeded", faults


def _seeded(build: Callable[[], nn.Module], layout: str, engine: str) -> tuple[dict[str, list], list[str]]:
    """What this rank holds of what a callable builds: name -> (index into the whole, values), and what its notes say of a fall-back."""
    with init(layout, device="cpu", seed=5, timeout_s=60) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fall-back to rank 0, which the note tells too
        build()  # imports its code: what that computes on one warm rank only would count as another constructor
        torch.manual_seed(1000 + world.rank)  # numbers of this rank's own, that must not be seen
        keep = {} if engine == "ddp" else {"min_unit_bytes": 0}
        model = parallelize(build, world, sharding=Sharding(engine=engine, **keep))
        runtime = runtime_of(model)
        held = {
            key: [(piece.full_index, tensor[piece.local_index].clone()) for piece in runtime.pieces(key, tensor)]
            for key, tensor in runtime.local_tensors().items()
        }
        told = [note.why for note in recipe_of(model).notes if note.name == "init" and note.why.startswith("rank0")]
        return held, told


@functools.cache
def _constructed(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    for start in (torch.manual_seed, random.seed, np.random.seed):
        start(seed)
    return {name: tensor.detach() for name, tensor in all_tensors(build()).items()}


def unlike(found: dict[str, Tensor], *made: dict[str, Tensor]) -> list[str]:
    """What is not as constructors that drew apart have it: empty if all is well.

    Where those agree nothing was drawn, and ``found`` must be equal to the bit; elsewhere mean and spread are theirs
    within six times the error of a sample of that size, and the largest value within a factor of two and a half. Rows that
    are zero in all of them (of the padding) are zero.
    """
    faults = [f"{name} is missing" for name in made[0].keys() - found.keys()]
    for name, value in found.items():
        wanted = [one[name] for one in made]
        first = wanted[0]
        if value.shape != first.shape or value.dtype != first.dtype:
            faults.append(f"{name}: {tuple(value.shape)} {value.dtype}, not {tuple(first.shape)} {first.dtype}")
        elif all(torch.equal(first, other) for other in wanted):
            if not torch.equal(value, first):
                faults.append(f"{name}: not the constant of the constructor")
        elif value.numel() >= 12:
            empty = (
                (torch.stack(wanted).flatten(2) == 0).all(2).all(0)
                if value.dim() > 1
                else torch.zeros(len(value), dtype=bool)
            )
            if value[empty].any():
                faults.append(f"{name}: not the zero rows of the constructor")
            faults += [f"{name}: {text}" for text in _unlike_samples(value.double(), torch.stack(wanted).double())]
    return faults


def _unlike_samples(value: Tensor, wanted: Tensor) -> list[str]:
    n, spread = value.numel(), float(wanted.std())
    if not torch.isfinite(value).all():
        return ["not finite"]
    faults = []
    if abs(float(value.mean() - wanted.mean())) > 6 * 1.3 * spread / math.sqrt(n):
        faults.append(f"mean {float(value.mean()):.3g}, not {float(wanted.mean()):.3g}")
    if abs(float(value.std()) / spread - 1) > 6 / math.sqrt(n):
        faults.append(f"std {float(value.std()):.3g}, not {spread:.3g}")
    if not 0.4 < float(value.abs().max() / wanted.abs().max()) < 2.5:
        faults.append(f"largest {float(value.abs().max()):.3g}, not {float(wanted.abs().max()):.3g}")
    return faults
