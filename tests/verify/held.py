"""What a model of other packages is held to: the numbers of one process, every block a unit."""

from collections.abc import Callable
from typing import Any

from layouts import LAYOUTS
from models import Model

from shardwise import Sharding
from shardwise.verify import Report, verify

__all__ = ["compare"]


def compare(model: Model, run: Callable[..., Any], layout: str) -> Report:
    """Three steps, three micro-batches per rank with unequal counts, clipped, every block a unit.

    Raises:
        VerifyError: the first tensor that differs.
        AssertionError: it was never sharded, which would make it equal too.
    """
    text, num_ranks, engine = LAYOUTS[layout]
    report = verify(
        model.build,
        text,
        batches=model.windows(3, 3 * num_ranks),
        loss=model.loss,
        count=model.count,
        forward=model.forward,
        max_grad_norm=0.5,
        sharding=Sharding(engine=engine, min_unit_bytes=0) if layout == "ddp-2" else _sharding(model, engine),
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


def _sharding(model: Model, engine: str) -> Sharding:
    """The smallest units there are."""
    if model.units != "auto":
        return Sharding(engine=engine, units=model.units)  # each is one, whatever its size
    return Sharding(engine=engine, min_unit_bytes=0)
