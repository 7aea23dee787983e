"""Seeded values: functions of (seed, name), the same under every layout."""

import models
import models.constructors as make
import pytest
import torch
from layouts import LAYOUTS, VALUES
from parallel.on_ranks import forward_of, host_growth, sharded
from parallel.test_tape import replayed
from parallel.values import same
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError, RankError

OTHERS = [layout for layout in VALUES if layout != "one"]


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("name", ["NanoGPT", "odd"])
def test_the_same_values_under_every_layout(ranks, name, layout):
    values, said = sharded(ranks, name, layout)
    alone, _ = sharded(ranks, name, "one")
    assert same(values, alone)
    assert said[0][0]["init"].startswith("seeded: ") and said[0][1] == []


@pytest.mark.parametrize(
    "name", ["standard", "constants", "Rope", "Copies", "Kept", "weight_norm", "initialisers", "gaussians"]
)
def test_every_kind_of_constructor(ranks, name):
    values, said = sharded(ranks, name, "fsdp-4")
    assert same(values, replayed(models.get(name).build))
    assert [notes["init"] for notes, *_ in said if "rank0" in notes["init"]] == []


def _drawn_twice():
    """Parameters that are each made of two draws of one shape."""
    noisy = make.parameter(nn.init.normal_, make.D, make.D)
    with torch.no_grad():
        noisy.add_(torch.randn_like(noisy))
    return make.Holder(noisy=noisy, product=nn.Parameter(torch.randn(make.D, make.D) * torch.randn(make.D, make.D)))


def _values_drawn_twice(layout):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(_drawn_twice, world)
        return sw.full_state_dict(model), sw.describe(model)


def test_two_draws_that_make_one_parameter_are_independent(ranks):
    alone, said = ranks.run(_values_drawn_twice, 1, "dp_shard=1")[0]
    assert "seeded: " in said
    assert same(alone, ranks.run(_values_drawn_twice, 2, "dp_shard=2")[0][0])
    assert abs(alone["noisy"].std() / 2**0.5 - 1) < 0.05  # a sum with itself would have a spread of 2
    product = alone["product"]  # and a square no negative values
    assert abs((product < 0).double().mean() - 0.5) < 0.05 and abs(product.mean()) < 0.1


def test_another_seed_gives_other_values(ranks):
    one, _ = sharded(ranks, "two_alike", "fsdp-2")
    other, _ = sharded(ranks, "two_alike", "fsdp-2", seed=1)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_the_storage_dtype_asked_for(ranks):
    values, _ = sharded(ranks, "NanoGPT", "fsdp-2", precision="fp64")
    plain, _ = sharded(ranks, "NanoGPT", "one")
    assert all(values[name].dtype == torch.float64 for name in values)
    assert same({name: value.float() for name, value in values.items()}, plain)


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2", "fsdp2-2x1"])
@pytest.mark.parametrize("name", ["recurrent", "Kept", "odd"])
def test_the_module_runs_with_them(ranks, name, layout):
    """Flat weights of an LSTM, tensors in lists and objects, ties: everything that forward reads is there."""
    text, count, engine = LAYOUTS[layout]
    alone = ranks.run(forward_of, 1, name, "dp_shard=1")[0]
    for output in ranks.run(forward_of, count, name, text, engine):
        torch.testing.assert_close(output, alone, rtol=1e-12, atol=1e-12)


def test_rates_of_stochastic_depth_do_not_make_a_model_fall_back(ranks):
    found = [sharded(ranks, "Rates", layout) for layout in ("one", "fsdp-2", "ddp-2")]
    assert all(notes["init"].startswith("seeded") for _, said in found for notes, *_ in said)
    assert all(same(values, found[0][0]) for values, _ in found)


# ---- what falls back to rank 0 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("from_numpy_random", "its constructor draws from numpy.random"),
        ("from_python_random", "its constructor draws from Python's random"),
        ("from_item", "it cannot be built on meta ("),
        ("from_own_generator", "its constructor draws from a generator of its own"),
        ("from_numpy_generator", "its constructor does not do the same on every rank"),
        ("from_listed_numbers", "its constructor does not do the same on every rank"),
        ("from_the_rank", "its constructor does not do the same on every rank"),
    ],
)
def test_what_cannot_be_replayed_is_built_on_rank_0_and_it_is_said(ranks, name, reason):
    _, said = sharded(ranks, name, "fsdp-2")  # that the ranks' pieces fit together is checked there
    for rank, (notes, warned, _) in enumerate(said):
        assert notes["init"].startswith(f"rank0 (seeded values are not possible: {reason}")
        assert len(warned) == (rank == 0) and all(reason in text for text in warned)


def test_what_a_rank_has_done_differently_is_told(ranks):
    _, said = sharded(ranks, "from_the_rank", "fsdp-2")
    told = said[0][0]["init"]
    assert all(notes["init"] == told for notes, *_ in said)
    assert "): line " in told and " of its record is " in told
    first, other = told.partition(" of its record is ")[2].removesuffix(" on rank 1)").split(" on rank 0, and ")
    assert first != other and len(first) < 110


def test_a_real_number_drawn_while_building_is_the_same_on_every_rank(ranks):
    values, said = sharded(ranks, "with_a_real_draw", "fsdp-4")
    assert said[0][0]["init"].startswith("seeded")
    assert len(set(values["weight"].flatten().tolist())) == 1


def test_numbers_drawn_for_plain_attributes_are_rank_0s(ranks):
    _, said = sharded(ranks, "with_drawn_attributes", "fsdp-2")
    first, second = (plain for *_, plain in said)
    assert first["python"] == second["python"] and first["order"] == second["order"]
    assert (first["array"] == second["array"]).all()


# ---- what is never written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one", "fsdp-2"])
@pytest.mark.parametrize(("name", "missing"), [("unwritten", 6), ("unwritten_ints", 6), ("unwritten_flags", 6)])
def test_a_tensor_that_nothing_writes_is_an_error_with_its_name(ranks, name, missing, layout):
    with pytest.raises(RankError) as caught:
        sharded(ranks, name, layout)
    error = caught.value.__cause__
    assert isinstance(error, PlanError) and error.name == "b.late"
    assert error.given == f"{missing} of 12 values are not written"


# ---- host memory -------------------------------------------------------------------------------------------------------


@pytest.mark.quick("seeded-fsdp-2", "rank0-one")
@pytest.mark.parametrize(("how", "layout"), [("seeded", "fsdp-2"), ("seeded", "one"), ("rank0", "one")])
def test_host_memory_is_the_shards_and_about_one_tensor(ranks, how, layout):
    """200 MiB of parameters in tensors of 4 MiB. Built for real and copied into shards, a rank holds them twice."""
    text, count, _ = LAYOUTS[layout]
    for size, growth in ranks.run(host_growth, count, text, how):
        print(f"{how} on {layout}: shards of {size:.0f} MiB, peak growth {growth:.0f} MiB")
        assert size == 200 / count
        if how == "seeded":
            assert growth < size + 100
        else:
            assert growth > size + 150  # or the measurement measures nothing
