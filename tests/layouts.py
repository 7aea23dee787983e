"""Layouts that tests run under: one table, its subsets by purpose, and ``every_layout`` to parametrise a test over some of them."""

from typing import NamedTuple

import pytest

__all__ = ["LAYOUTS", "TRIPS", "RankLayout", "every_layout"]


class RankLayout(NamedTuple):
    """A layout as users write it, on how many ranks it is, and the engine asked for."""

    text: str
    num_ranks: int
    engine: str = "auto"


LAYOUTS = {
    "one": RankLayout("dp_shard=1", 1),
    "one-fsdp2": RankLayout("dp_shard=1", 1, "fsdp2"),
    "ddp-2": RankLayout("dp_replicate=2", 2),
    "ddp-4": RankLayout("dp_replicate=4", 4),
    "fsdp-2": RankLayout("dp_shard=2", 2),
    "fsdp-3": RankLayout("dp_shard=3", 3),
    "fsdp-4": RankLayout("dp_shard=4", 4),
    "hsdp-1x2": RankLayout("dp_replicate=1,dp_shard=2", 2, "fsdp2"),
    "hsdp-2x2": RankLayout("dp_replicate=2,dp_shard=2", 4),
    "fsdp2-2x1": RankLayout("dp_replicate=2", 2, "fsdp2"),
}

# Subsets, by what a test needs of them.
MATRIX = ("one", "ddp-2", "ddp-4", "fsdp-2", "fsdp-4", "hsdp-1x2", "hsdp-2x2", "fsdp2-2x1")  # of parity
FOREIGN = ("fsdp-2", "ddp-2", "hsdp-2x2")  # of parity, for models of other packages
VALUES = ("one", "ddp-2", "fsdp-2", "fsdp-4", "hsdp-2x2", "fsdp2-2x1")  # initial values
KINDS = (
    "one",
    "ddp-2",
    "fsdp-2",
    "fsdp-4",
    "hsdp-2x2",
)  # each technique of data parallelism, and two numbers of shards
RESHARDED = ("one", "ddp-2", "ddp-4", "fsdp-2", "fsdp-3", "fsdp-4", "hsdp-2x2")  # state goes between them
RESUMED = ("one", "ddp-2", "ddp-4", "fsdp-2", "fsdp-4", "hsdp-2x2")  # a checkpoint resumed to the last bit
BLOCKS = ("one-fsdp2", "ddp-2", "ddp-4", "fsdp-2", "fsdp-4")  # blocks that run again or are compiled

# From a layout to which others, of KINDS: every pair in soak; in each run of the tests every layout once as the first and once as
# the second, never itself.
TRIPS = [
    *(pytest.param(first, (KINDS[i - 2],), id=f"{first}-{KINDS[i - 2]}") for i, first in enumerate(KINDS)),
    *(pytest.param(first, KINDS, id=f"{first}-all", marks=pytest.mark.soak) for first in KINDS),
]


def every_layout(*names: str, soak: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Runs a test once for each layout of these names, given as ``layout``, a :class:`RankLayout`; those in ``soak`` only there."""
    return pytest.mark.parametrize(
        "layout",
        [pytest.param(LAYOUTS[name], id=name, marks=pytest.mark.soak if name in soak else ()) for name in names],
    )
