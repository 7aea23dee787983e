"""The parity matrix: every model tagged "matrix" under every layout, accumulation, clipping and unit size."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import models
from layouts import LAYOUTS, MATRIX

from shardwise import Sharding
from shardwise.verify import Report, verify
from shardwise.world import World

ON_BOTH_AXES = ("hsdp-1x2",)
"""Where the mesh keeps its axis of one replica, which Shardwise leaves out: FSDP2's code for replicas, on two ranks."""
DEFAULT_UNIT = None


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    case: str
    layout: str
    accumulate: int
    clip: bool
    min_unit_bytes: int | None

    def __str__(self) -> str:
        unit = "blocks" if self.min_unit_bytes == 0 else "default"
        return f"{self.case}-{self.layout}-acc{self.accumulate}-{'clip' if self.clip else 'noclip'}-{unit}"

    def run(self, run: Callable[..., Any], **changes: Any) -> Report:
        """Compares this cell; ``run`` is a pool's. Raises VerifyError."""
        case = models.get(self.case)
        layout, num_ranks, engine = LAYOUTS[self.layout]
        options = {
            "batches": case.windows(3, num_ranks * self.accumulate),
            "loss": case.loss,
            "count": case.count,
            "forward": case.forward,
            "max_grad_norm": 0.5 if self.clip else None,
            "sharding": Sharding(engine=engine, min_unit_bytes=self.min_unit_bytes),
            "run": functools.partial(_on_both_axes, run) if self.layout in ON_BOTH_AXES else run,
        }
        return verify(case.build, layout, **{**options, **changes})

    def assert_sharded(self, report: Report) -> None:
        """A comparison of a model that was never sharded would pass too: the collectives of a step are counted."""
        layout, num_ranks, _ = LAYOUTS[self.layout]
        counts, units = report.collectives, report.num_units
        exchanges = counts.get("allreduce", 0)
        if report.engine == "ddp":
            assert (exchanges == 0 if num_ranks == 1 else exchanges >= 3) and "_reduce_scatter_base" not in counts
            return
        if self.min_unit_bytes == 0:
            assert units >= 3
        if "dp_shard" in layout and num_ranks > 1:
            assert counts["_reduce_scatter_base"] == units
            assert counts["_allgather_base"] == self.accumulate * (2 * (units - 1) + 1)
            whole = report.bytes_per_rank
            assert max(whole) < sum(whole)
        if "dp_replicate=2" in layout or self.layout in ON_BOTH_AXES:
            assert exchanges == 2 + units


def _on_both_axes(run: Callable[..., Any], function: Callable[..., Any], size: int, *args: Any) -> Any:
    """``run(function, size, *args)``, with a mesh of both axes on each rank."""
    return run(_with_both_axes, size, function, *args)


def _with_both_axes(function: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.object(World, "sharding_mesh", lambda world, axis="fsdp": world.mesh):
        return function(*args)


def all_cells() -> Iterator[Cell]:
    """The whole matrix."""
    for cell in itertools.product(models.select("matrix"), MATRIX, (1, 3), (True, False), (0, DEFAULT_UNIT)):
        yield Cell(*cell)


KINDS = {  # of techniques; layouts of one kind differ in how many ranks an axis has
    "replicas": ("ddp-2", "ddp-4"),
    "shards": ("fsdp-4", "fsdp-2"),
    "both": ("hsdp-2x2", "hsdp-1x2", "fsdp2-2x1", "one"),
}


def sample_cells() -> Iterator[Cell]:
    """Every model with one layout of each kind (all of them: :func:`all_cells`), with the other choices dealt so that every pair
    of values of any two occurs."""
    for i, case in enumerate(models.select("matrix")):
        for j, layouts in enumerate(KINDS.values()):
            k = (i + 3 * j + i // 3) % 8
            layout = layouts[i % len(layouts)]
            yield Cell(case, layout, 3 if k & 1 else 1, bool(k & 2), 0 if k & 4 else DEFAULT_UNIT)
