"""Blocks that run again in backward: the same gradients with dropout, under every layout; and that they do run again."""

import pytest
import torch
from layouts import BLOCKS, LAYOUTS
from techniques.remat.recompute import assert_same, build, kept_and_run, of_feed, one_process, train
from torch import nn
from verify.matrix import Cell

from shardwise import Precision, Remat, Sharding
from shardwise.errors import PlanError, UnsupportedError
from shardwise.parallel import describe, parallelize, recipe_of
from shardwise.world import init

WAYS = {
    "none": None,
    "full": "full",
    "selective": "selective",
    "every-2": Remat(every=2),
    "by-class": Remat(targets=("Block",)),
    "by-name": Remat(targets=("blocks.[02]",), mode="selective", save=("attention", "tanh")),
}


def on(ranks, layout: str, **options):
    text, count, engine = LAYOUTS[layout]
    return ranks.run(train, count, text, engine, timeout_s=100, **options)


@pytest.mark.quick("ddp-2-full", "fsdp-2-selective")
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        pytest.param(layout, way, marks=pytest.mark.soak if layout in {"ddp-4", "fsdp-4"} else ())
        for layout in BLOCKS
        for way in WAYS
        if layout in {"fsdp-2", "ddp-4"} or way not in {"every-2", "by-name"}  # which blocks differs, not how
    ],
)
def test_gradients_with_dropout_are_one_processs(ranks, layout, way):
    want = one_process()
    for answer in on(ranks, layout, remat=WAYS[way]):
        assert_same(answer["grads"], want)


RUNS = {"none": (1, 1, 1), "full": (2, 2, 2), "selective": (2, 2, 2), "every-2": (2, 1, 2), "by-name": (2, 1, 2)}


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", ["one-fsdp2", "ddp-2", "fsdp-2"])
@pytest.mark.parametrize("way", list(RUNS))
def test_blocks_run_as_often_as_asked(ranks, layout, way):
    for answer in on(ranks, layout, remat=WAYS[way]):
        assert answer["runs"] == [times * answer["micro"] for times in RUNS[way]]


def test_what_is_kept_grows_as_docs_remat_md_draws_it(ranks):
    none, every, selective, full = (
        ranks.run(kept_and_run, 1, remat, of_feed)[0].then for remat in (None, Remat(every=2), "selective", "full")
    )
    assert full < min(selective, every) and max(selective, every) < none


def test_selective_never_keeps_more_than_no_remat(ranks):
    """Of blocks with tanh it would keep the matrix products beside what tanh keeps: they do not run again at all."""
    none, selective, full = (ranks.run(kept_and_run, 1, remat)[0] for remat in (None, "selective", "full"))
    assert selective.then == none.then and selective.operators == none.operators
    assert selective.at_first <= full.at_first + 16_000 < none.at_first / 2  # states of generators
    assert selective.chosen.startswith("kept for backward by 4 blocks: all. ")


@pytest.mark.quick("fsdp-2")
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
def test_what_is_kept_and_what_is_run_again(ranks, layout):
    none, full, selective = (on(ranks, layout, remat=WAYS[way])[0] for way in ("none", "full", "selective"))
    assert full["kept"][0] < none["kept"][0] / 3
    tanh, matmul = "aten.tanh.default", ("aten.addmm.default", "aten.bmm.default", "aten.mm.default")
    count = {id(a): sum(a["backward"][name] for name in matmul) for a in (none, full, selective)}
    assert none["backward"][tanh] == 0
    assert full["backward"][tanh] == selective["backward"][tanh] == 3 * none["micro"]
    assert count[id(full)] > count[id(none)] and count[id(selective)] == count[id(none)]


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
def test_names_are_the_users(ranks, layout):
    model = build()
    for answer in on(ranks, layout, remat="full"):
        assert answer["names"] == [list(model.state_dict()), [name for name, _ in model.named_modules()]]


def test_blocks_that_are_no_unit_run_again_too(ranks):
    for answer in on(ranks, "fsdp-2", remat="full"):
        modules = [module for _, module in answer["edits"]]
        assert modules == ["blocks.0", "blocks.1", "blocks.2", "experts.0", "experts.1"]


def units_inside(layout: str):
    answer = train(layout, units=("blocks.*.up",), remat="full")
    return answer["grads"], answer["runs"]


def test_units_inside_a_block_are_gathered_again(ranks):
    want = one_process()
    for grads, runs in ranks.run(units_inside, 2, "dp_shard=2"):
        assert_same(grads, want)
        assert runs == [4, 4, 4]


ZOO = [
    ("reference", "fsdp-2"),
    ("conv", "ddp-2"),  # batch norm: running statistics count each batch once
    ("conv", "fsdp-4"),
    ("recurrent", "fsdp-2"),
    ("odd", "ddp-4"),
    ("odd", "hsdp-2x2"),
    ("branches", "fsdp-2"),
    ("experts", "fsdp-4"),
    ("branch-first", "fsdp-2"),
    ("inplace", "fsdp-2"),
    ("gpt2", "ddp-2"),
    ("llama", "fsdp-4"),
    ("t5", "fsdp-2"),
]


# Every other model is seen with one way, the rest in soak; the recurrent one is refused the second, see below.
WAYS_OF_ZOO = [
    pytest.param(case, layout, way, marks=() if number % 4 == 2 * second or case == "recurrent" else pytest.mark.soak)
    for number, (case, layout) in enumerate(ZOO)
    for second, way in enumerate(("full", "selective"))
    if (case, way) != ("recurrent", "selective")
]


@pytest.mark.quick("reference-fsdp-2-full", "branch-first-fsdp-2-full", "gpt2-ddp-2-selective")
@pytest.mark.parametrize(("case", "layout", "way"), WAYS_OF_ZOO)
def test_the_zoo_trains_as_in_one_process(ranks, case, layout, way):
    cell = Cell(case, layout, 3, True, 0)
    report = cell.run(ranks.run, remat=way)
    if case != "inplace" and "hsdp" not in layout:
        cell.assert_sharded(report)


# ---- what is said, and what is refused ------------------------------------------------------------------------------------


def told():
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(build(), world, remat=Remat(mode="selective", every=2))
        return describe(model), recipe_of(model).to_json()


def test_the_recipe_says_which_and_why(ranks):
    text, json = ranks.run(told, 1)[0]
    line = next(line for line in text.splitlines() if line.startswith("remat"))
    assert line == (
        "remat: 3 modules (blocks.0, blocks.2, experts.0): run again in backward, but for matmul, attention: a block of an "
        "outermost list; the first of every 2 [mode=selective, save=['matmul', 'attention']]"
    )
    assert '"technique": "remat"' in json and '"module": "blocks.2"' in json


def refused(options):
    with init("dp_shard=1", device="cpu") as world:
        model = build()
        try:
            parallelize(model, world, remat=options)
        except (PlanError, UnsupportedError) as error:
            return type(error).__name__, str(error), "forward" in vars(model.blocks[0])
    return None


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (Remat(targets=("Blok",)), "PlanError", "did you mean 'Block' or"),
        (Remat(offload=True), "UnsupportedError", "lies in host memory already"),
        (Remat(mode="selective", save=("mn",)), "PlanError", "neither a group of operators nor an operator"),
        (Remat(mode="selective", save=("aten.linear",)), "PlanError", "taken apart into other operators"),
        (Remat(mode="selective", save=("bernoulli",)), "PlanError", "other dropout masks"),
        (Remat(mode="selective", save=("aten.relu_",)), "PlanError", "works in place"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(ranks, options, kind, words):
    found, text, changed = ranks.run(refused, 1, options)[0]
    assert found == kind and words in text and not changed


def differ(rank_options):
    with init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        try:
            parallelize(build(), world, remat=rank_options[world.rank])
        except Exception as error:
            return str(error)
    return None


def test_ranks_that_ask_for_different_blocks_are_told(ranks):
    for text in ranks.run(differ, 2, ["full", Remat(every=2)]):
        assert "remat of blocks.1" in text


# ---- bf16: the second run sees what the first saw --------------------------------------------------------------------------


def half(remat):
    answer = train(
        "dp_shard=2", make=build_single, precision=Precision(storage="float32", compute="bfloat16"), remat=remat
    )
    return answer["grads"], answer["runs"]


def build_single() -> nn.Module:
    return build().float()


@pytest.mark.parametrize("way", ["full", "selective"])
def test_t29_the_second_run_sees_the_same_casts(ranks, way):
    """bf16 compute: were an input cast in the first run only, the second would differ in dtype, or by rounding."""
    for (plain, once), (again, twice) in zip(ranks.run(half, 2, None), ranks.run(half, 2, way), strict=True):
        assert once == [2, 2, 2] and twice == [4, 4, 4]
        for name, grad in plain.items():
            assert (grad is None and again[name] is None) or torch.equal(grad, again[name]), name


def sharding_keeps_meaning():
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(build(), world, sharding=Sharding(engine="fsdp2", min_unit_bytes=0), remat="full")
        return isinstance(model.blocks[0], type(build().blocks[0])), [u.name for u in recipe_of(model).units]


def test_the_class_and_the_units_stay(ranks):
    same, units = ranks.run(sharding_keeps_meaning, 1)[0]
    assert same and units == ["blocks.0", "blocks.1", "blocks.2", "experts.0", "experts.1", ""]
