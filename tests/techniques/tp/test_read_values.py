"""Values that a loop reads of single parameters and gradients: of a rank's part they are refused, of the whole they are those of one
plain process."""

import functools
import math

import pytest
import torch
from step.plain import assert_close
from techniques.tp.read_values import (
    LOOPS,
    MADE,
    MOMENTS,
    READS,
    allowed,
    alone,
    as_it_is,
    batches,
    beside,
    build,
    loss_of,
    moments,
    of_ranks,
    single_reads,
)
from torch import nn

import shardwise as sw

LAYOUTS = [
    "tp=2",
    pytest.param("dp_replicate=2,tp=2", marks=pytest.mark.soak),
    "dp_shard=2,tp=2",
]


def size(layout):
    return 4 if "," in layout else 2


@functools.cache
def wanted():
    return alone()


@pytest.mark.quick("tp=2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_the_whole_they_are_those_of_one_process(ranks, layout):
    for found in ranks.run(of_ranks, size(layout), layout, sw.full_tensor):
        for loop in LOOPS:
            assert not isinstance(found[loop.__name__], str), found[loop.__name__]
            assert_close(found[loop.__name__], wanted()[loop.__name__])


@pytest.mark.parametrize("layout", ["tp=2"])
def test_of_a_part_each_loop_is_refused_by_the_parameters_name(ranks, layout):
    for found in ranks.run(of_ranks, size(layout), layout, as_it_is):
        for loop in LOOPS:
            text = found[loop.__name__]
            assert isinstance(text, str) and text.startswith("embed.weight: "), text
            assert "that is cut over tp, outside of the model's forward" in text and "sw.full_tensor(p.grad)" in text


@pytest.mark.quick("tp=2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_read_of_a_part_is_refused(ranks, layout):
    for found in ranks.run(single_reads, size(layout), layout):
        by_number = {"tolist", "numpy"} if "dp_shard" in layout else set()  # refused as for any DTensor
        if "dp_shard" in layout:  # torch cannot copy a DTensor that is no parameter
            assert "invalid python storage" in found["deepcopy", "gradient"]
            found["deepcopy", "gradient"] = found["deepcopy", "parameter"]
        passed = {
            key: text
            for key, text in found.items()
            if not text.startswith("a Python number" if key[0] in by_number else "blocks.0.up.weight: ")
        }
        assert passed == {} and len(found) == 2 * len(READS)


@pytest.mark.parametrize(
    ("layout", "stride"),
    [
        pytest.param("tp=2", 1, id="tp=2"),
        pytest.param("dp_shard=2,tp=2", 4, id="dp_shard=2,tp=2"),
        pytest.param("dp_shard=2,tp=2", 1, id="dp_shard=2,tp=2, all", marks=pytest.mark.soak),
        pytest.param("dp_replicate=2,tp=2", 1, id="dp_replicate=2,tp=2", marks=pytest.mark.soak),
    ],
)
def test_whenever_a_part_is_read_it_is_refused(ranks, layout, stride):
    for found in ranks.run(moments, size(layout), layout, stride):
        missed = {name: text for name, text in found.items() if not text.startswith(("blocks.0.", "embed.weight: "))}
        assert missed == {} and len(found) == len([*MOMENTS][::stride])


@pytest.mark.quick("tp=2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_right_on_a_part_passes(ranks, layout):
    model, given = build(), batches(0)
    num = sum(batch["labels"].numel() for batch in given)
    (sum(loss_of(model, batch) for batch in given) / num).backward()
    params, up, down = dict(model.named_parameters()), model.blocks[0].up.weight, model.blocks[0].down.weight
    for found in ranks.run(allowed, size(layout), layout):
        whole = {
            "row norms": up.norm(dim=1, keepdim=True) * torch.ones_like(up),
            "turned": up * 2,
            "filters": up**2,
            "where": torch.where(down > 0, down, down.grad),
            "norm of all": torch.nn.utils.get_total_norm([p.grad for p in params.values()]),
        }
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-14)
        for name, p in params.items():
            assert found["norms"][name].item() == pytest.approx(p.norm().item(), rel=1e-12)
            assert found["largest of gradients"][name].item() == pytest.approx(p.grad.abs().max().item(), rel=1e-12)
            assert found["products"][name].item() == pytest.approx((p * p.grad).abs().sum().item(), rel=1e-12)
        assert found["number"] == sum(p.numel() for p in params.values())
        assert found["is a parameter"] and found["saved"] and found["part"] and found["kept"] and found["hook"]
        assert math.isfinite(found["norm of all"].item())


@pytest.mark.parametrize("hidden", [6, 2])  # 2: a part is one row
def test_a_tensor_made_by_the_shape_of_a_part_is_refused(ranks, hidden):
    """A mask, a schedule along columns, an identity: each rank's part was changed as if it were the whole."""
    for found in ranks.run(beside, 2, "tp=2", True, hidden):
        passed = {
            key: text for key, text in found.items() if not isinstance(text, str) or "not cut as it is" not in text
        }
        along = {
            ("mul_ of rows", "2.weight"),
            *((name, "0.weight") for name in ("mul_ of columns", "copy_", "a number beside it", "grad", "computed")),
        }
        assert {*passed} <= along, passed  # along the dim that is not cut they are right
        assert {key for key in found if key not in along} == {
            (name, of) for name in MADE for of in ("0.weight", "2.weight")
        } - along
        assert "torch.zeros_like(p)" in found["add_ of eye", "0.weight"]


def test_what_is_cut_alike_or_is_one_for_all_ranks_goes_on(ranks):
    wanted = beside(None, False)
    for found in ranks.run(beside, 2, "tp=2", False):
        for key, values in found.items():
            assert not isinstance(values, str), (key, values)
            assert_close(dict(enumerate(values)), dict(enumerate(wanted[key])))


def other_hooks():
    """Whether a hook of a module that no sharded model has is registered as it is, once another model is cut over tp."""
    with sw.init("dp_shard=1,tp=2", device="cpu", timeout_s=30) as world:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        kept = sw.parallelize(model, world, example={"input": torch.randn(2, 4)})
        other = torch.nn.Linear(2, 2)
        hook = lambda *_: None  # noqa: E731
        other.register_forward_hook(hook)
        return next(iter(other._forward_hooks.values())) is hook, type(kept).__name__


def test_hooks_of_other_modules_stay_what_they_are(ranks):
    """Ranks compare their code, and copies of a module are bound anew to what they use."""
    assert all(is_same for is_same, _ in ranks.run(other_hooks, 2))


def places_of_a_part():
    """What is said of rows and columns of parts, what the fix reads, and the whole after the fix has written there."""
    with sw.init("tp=2", device="cpu", timeout_s=30) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
        model = sw.parallelize(model, world, example={"input": torch.ones(2, 4, dtype=torch.float64)})
        said = []
        with torch.no_grad():
            for act in (
                lambda p: p[:, 0].zero_(),
                lambda p: p[0],
                lambda p: p.select(0, 1),
                lambda p: p.narrow(0, 1, 2),
            ):
                try:
                    act(model[0].weight)
                except sw.UsageError as error:
                    said.append(str(error))
        row = sw.full_tensor(model[0].weight)[0]
        whole = sw.full_tensor(model[0].weight.detach())
        whole[:, 0].zero_()
        with torch.no_grad():
            model[0].weight.copy_(sw.shard_like(whole, model[0].weight))
        return said, row.shape, sw.full_tensor(model[0].weight).detach()


def test_a_place_of_a_part_says_how_it_is_read_and_written(ranks):
    """The advice was about norms of gradients."""
    for said, shape, whole in ranks.run(places_of_a_part, 2):
        assert len(said) == 4
        assert all("sw.full_tensor(p)[0]" in text and "p.copy_(sw.shard_like(whole, p))" in text for text in said)
        assert shape == (4,) and bool((whole[:, 0] == 0).all()) and bool((whole[:, 1:] != 0).all())
