"""Every knob leaves every number as it is, and changes what it is for."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from parallel.knobs import FSDP, HSDP, KNOBS, REPLICAS, Knob, Seen, gathers, scatters, see, sums
from zoo import CASES

from shardwise.config.fsdp1 import from_fsdp1
from shardwise.config.options import DDP, Compile, Precision, Remat, Sharding
from shardwise.parallel.fsdp2 import _offload
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


def compare(run, size: int, layout: str, options: dict, steps: int = 2) -> Report:
    case = CASES["reference"]
    return verify(
        case.build,
        layout,
        batches=case.windows(steps, 3 * size),
        loss=case.loss,
        count=case.count,
        forward=case.forward,
        max_grad_norm=0.5,
        run=run,
        **options,
    )


_usual: dict[str, list[Seen]] = {}


def by_default_on(ranks, size: int, layout: str, base: dict) -> list[Seen]:
    if layout not in _usual:
        _usual[layout] = ranks.run(see, size, layout, base)
    return _usual[layout]


@pytest.mark.parametrize(("knob", "size"), ON_RANKS)
def test_a_knob_leaves_the_numbers_and_shows(ranks, knob: Knob, size: int):
    layout = knob.layouts[size]
    compare(ranks.run, size, layout, knob.options)
    changed, usual = ranks.run(see, size, layout, knob.options), by_default_on(ranks, size, layout, knob.base)
    for with_knob, by_default in zip(changed, usual, strict=True):
        a, b = knob.seen(with_knob), knob.seen(by_default)
        assert knob.differs(a, b), f"{knob.setting}: {knob.observable}: {a}, by default {b}"


SHOWN_ELSEWHERE = {  # option -> the file of the test in which it shows, where it cannot as a row of this table
    "Sharding.engine": "tests/matrix.py",
    "Sharding.buffers": "tests/train/test_exchange.py",
    "Sharding.pin_memory": "tests/parallel/test_knobs.py",  # page-locked memory is an accelerator's
    "Remat.save": "tests/parallel/test_remat.py",
    "Remat.offload": "tests/gpu",
    "Compile.mode": "tests/parallel/test_compile.py",
    "Compile.dynamic": "tests/parallel/test_compile.py",
    "Compile.fullgraph": "tests/parallel/test_compile.py",
    "Compile.activation_memory_budget": "tests/parallel/test_compile.py",
    "Compile.targets": "tests/parallel/test_compile.py",
    **dict.fromkeys(
        ("Precision.storage", "Precision.compute", "Precision.reduce", "Precision.output", "Precision.cast_inputs"),
        "tests/parallel/test_precision.py",  # its numbers are not those of float64
    ),
    "Precision.parts": "tests/parallel/test_precision_parts.py",
}


@pytest.mark.parametrize(
    ("device", "asked", "pinned"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_pin_memory_reaches_fsdp2_where_there_is_an_accelerator(device, asked, pinned):
    recipe = SimpleNamespace(offload=True, pin_memory=asked)
    policy = _offload(recipe, SimpleNamespace(device=SimpleNamespace(type=device)))
    assert policy.pin_memory is pinned


def test_every_option_is_a_row_or_shows_in_another_test():
    settings = " ".join(knob.setting for knob in KNOBS).replace("remat='", "Remat mode='")
    for record in (Sharding, DDP, Remat, Compile, Precision):
        for option in record.__struct_fields__:
            name = f"{record.__name__}.{option}"
            if name in SHOWN_ELSEWHERE:
                file = ROOT / SHOWN_ELSEWHERE[name]
                text = "".join(f.read_text() for f in (file.rglob("*.py") if file.is_dir() else [file]))
                assert option in text, name
            else:
                assert f"{option}=" in settings, name


# ---- FSDP1's strategies ------------------------------------------------------------------------------------------------

UNITS, MICRO = 4, 2  # three blocks and the root
FREED, KEPT = MICRO * (2 * (UNITS - 1) + 1), MICRO * UNITS  # gathers of a window


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
    whole = sum(p.numel() * 8 for p in CASES["reference"].build().parameters())
    seen = ranks.run(see, 4, layout, options)
    exchanges = 2  # of the window, whatever is sharded
    for rank in seen:
        assert rank.at_rest == pytest.approx(whole / part, rel=0.2)  # rows of uneven tensors
        assert (gathers(rank), scatters(rank), sums(rank)) == (num_gathers, num_scatters, num_sums + exchanges)
        if part > 1:
            kept = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
            assert (rank.whole_params >= whole) if kept else (rank.whole_params < whole)
