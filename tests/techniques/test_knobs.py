"""Every knob leaves every number as it is, and changes what it is for."""

import warnings
from pathlib import Path
from typing import Any

import models
import pytest
from techniques.knobs import (
    DEVICE_KNOBS,
    FSDP,
    HSDP,
    KNOBS,
    REPLICAS,
    DeviceKnob,
    Knob,
    gathers,
    scatters,
    sums,
)
from techniques.observed import Seen, see

from shardwise import DDP, Compile, Precision, Remat, Sharding
from shardwise.dialects.fsdp1 import from_fsdp1
from shardwise.verify import Report, verify

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(180)

ON_RANKS = [  # where a knob is seen on 2 ranks, the same on 4 is for the soak; so is compiling, which test_compile.py sees
    pytest.param(
        knob, size, id=f"{i}-{size}", marks=[pytest.mark.soak] if size > min(knob.layouts) or knob.is_slow else []
    )
    for i, knob in enumerate(KNOBS)
    for size in knob.layouts
]


def compare(run, size: int, layout: str, options: dict, steps: int = 2, **more: Any) -> Report:
    case = models.get("reference")
    return verify(
        case.build,
        layout,
        batches=case.windows(steps, 2 * size),
        loss=case.loss,
        count=case.count,
        forward=case.forward,
        max_grad_norm=0.5,
        run=run,
        **more,
        **options,
    )


_seen: dict[tuple, list[Seen]] = {}


def seen_with(ranks, size: int, knob: Knob, options: dict) -> list[Seen]:
    """What ranks see; once for all knobs that are compared with the same, and that look at other things in the same."""
    key = (knob.layouts[size], repr(options), knob.watch, knob.dtype)
    if key not in _seen:
        _seen[key] = knob.run(ranks.run, size, options)
    return _seen[key]


_equal: set[tuple] = set()


# 12 offload, 16 min_unit_bytes, 18 engine, 19 buffers, 24 and 26 remat, 31 what it saves, 44 and 46 precision
@pytest.mark.quick("0-2", "5-2", "10-2", "18-2", "20-2", "26-2", "44-2")
@pytest.mark.parametrize(("knob", "size"), ON_RANKS)
def test_a_knob_leaves_the_numbers(ranks, knob: Knob, size: int):
    """Once for all knobs with these options."""
    key = (knob.layouts[size], repr(knob.options), knob.gate, knob.dtype)
    if key not in _equal:
        compare(ranks.run, size, knob.layouts[size], knob.options, gate=knob.gate, dtype=knob.dtype)
        _equal.add(key)


@pytest.mark.parametrize(("knob", "size"), ON_RANKS)
def test_a_knob_shows(ranks, knob: Knob, size: int):
    changed, usual = (seen_with(ranks, size, knob, options) for options in (knob.options, knob.base))
    for with_knob, by_default in zip(changed, usual, strict=True):
        a, b = knob.seen(with_knob), knob.seen(by_default)
        assert knob.differs(a, b), f"{knob.setting}: {knob.observable}: {a}, by default {b}"


@pytest.mark.parametrize("knob", DEVICE_KNOBS, ids=lambda knob: knob.option)
def test_a_knob_of_an_accelerator_shows_in_what_torch_is_asked_for(knob: DeviceKnob):
    a, b = knob.seen(knob.asked), knob.seen(not knob.asked)
    assert knob.differs(a, b), f"{knob.setting}: {knob.observable}: {a}, by default {b}"


def test_every_option_is_a_row():
    shown = {knob.option for knob in (*KNOBS, *DEVICE_KNOBS)}
    options = {f"{r.__name__}.{o}" for r in (Sharding, DDP, Remat, Compile, Precision) for o in r.__struct_fields__}
    assert shown == options


# ---- FSDP1's strategies ------------------------------------------------------------------------------------------------

UNITS, MICRO = 4, 2  # three blocks and the root
FREED, KEPT = MICRO * 2 * (UNITS - 1) + 1, MICRO * (UNITS - 1) + 1  # gathers of a window: the root's once


@pytest.mark.quick("HYBRID_SHARD_ZERO2-2-7-4-4")
@pytest.mark.parametrize(
    ("strategy", "part", "num_gathers", "num_scatters", "num_sums"),
    [
        ("FULL_SHARD", 4, FREED, UNITS, 0),
        pytest.param("SHARD_GRAD_OP", 4, KEPT, UNITS, 0, marks=pytest.mark.soak),  # the others have both of its halves
        pytest.param("HYBRID_SHARD", 2, FREED, UNITS, UNITS, marks=pytest.mark.soak),
        ("HYBRID_SHARD_ZERO2", 2, KEPT, UNITS, UNITS),
        ("NO_SHARD", 1, 0, 0, 1),
    ],
)
def test_a_strategy_holds_and_sends_what_it_promises(ranks, strategy, part, num_gathers, num_scatters, num_sums):
    """At rest a rank holds its part; in backward it has gathered one block after another, or all of them; gradients are
    scattered, and in the hybrid ones also summed over the replicas."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meant = from_fsdp1(strategy, ranks_per_node=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP",
                           transformer_layer_cls="Block")  # fmt: skip
    options = {"sharding": meant.sharding}
    compare(ranks.run, 4, meant.layout.replace("-1", str(4 // (2 if "HYBRID" in strategy else 1))), options)
    layout = {4: FSDP[4], 2: HSDP[4], 1: REPLICAS[4]}[part]
    whole = sum(p.numel() * 8 for p in models.get("reference").build().parameters())
    seen = ranks.run(see, 4, layout, options)
    exchanges = 2  # of the window, whatever is sharded
    for rank in seen:
        assert rank.at_rest == pytest.approx(whole / part, rel=0.2)  # rows of uneven tensors
        assert (gathers(rank), scatters(rank), sums(rank)) == (num_gathers, num_scatters, num_sums + exchanges)
        if part > 1:
            kept = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
            assert (rank.whole_params >= whole) if kept else (rank.whole_params < whole)
