"""Copies of a parameter on several ranks that are not equal are refused before the first step, whoever made them so."""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.parallel.copies import _BLOCK, checksum_of
from shardwise.parallel.step_checks import stepped_by


def _build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 16))


def _first_step(layout, change):
    """What an optimizer's first step after ``change`` says, and whether any parameter has another value than before it."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(_build(), world, example={"input": torch.arange(4)})
        with torch.no_grad():
            change(model, world.rank)
        before = [param.detach().clone() for param in model.parameters()]
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        with sw.accumulate(model, is_last=True):
            model(torch.arange(4)).square().sum().backward()
        said = ""
        try:
            optim.step()
        except sw.UsageError as error:
            said = str(error)
        pairs = [tuple(map(sw.full_tensor, pair)) for pair in zip(before, model.parameters(), strict=True)]
        return said, all(torch.equal(*pair) for pair in pairs)


def draws_for_itself(model, rank):
    torch.manual_seed(rank)
    for param in model.parameters():
        param.normal_()


def loads_for_itself(model, rank):
    torch.manual_seed(rank)
    model.load_state_dict({name: torch.randn(value.shape) for name, value in model.state_dict().items()})


def changes_one_bit(model, rank):
    if rank:
        weight = model[2].weight
        weight[3] = torch.nextafter(weight[3], weight[3] + 1)


def sets_the_same(model, rank):
    model[2].bias.fill_(3)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "change", "name"),
    [
        ("dp_replicate=2", 2, draws_for_itself, "0.weight"),
        ("dp_replicate=2", 2, loads_for_itself, "0.weight"),
        ("dp_replicate=2", 2, changes_one_bit, "2.weight"),
        ("dp_shard=1,tp=2", 2, changes_one_bit, "2.weight"),
    ],
)
def test_copies_that_differ_are_refused_by_name(ranks, layout, num_ranks, change, name):
    for said, is_as_before in ranks.run(_first_step, num_ranks, layout, change):
        assert re.match(
            rf"{re.escape(name)}: a parameter that ranks 0, 1 hold copies of, with other values on each", said
        )
        assert is_as_before


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2", "dp_shard=1,tp=2"])
def test_equal_ones_and_shards_are_trained(ranks, layout):
    assert ranks.run(_first_step, 2, layout, sets_the_same) == [("", False)] * 2


def _hsdp():
    """Of 2 replicas in 2 shards, whose copies of the second shard differ."""
    with sw.init("dp_replicate=2,dp_shard=2", device="cpu") as world:
        model = sw.parallelize(_build(), world)
        if world.rank == 3:
            with torch.no_grad():
                model[1].weight.to_local()[0, 0] += 1
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with sw.window(model, [{"x": torch.arange(4)}], count=lambda batch: len(batch["x"])) as window:
            for batch in window:
                (model(batch["x"]).square().sum() / window.num_tokens).backward()
        with pytest.raises(sw.UsageError, match=r"1\.weight: a parameter that ranks 1, 3 hold copies of"):
            optim.step()


def test_shards_that_replicas_hold_are_compared_too(ranks):
    ranks.run(_hsdp, 4)


def test_the_sum_that_ranks_compare_takes_no_second_tensor():
    tensor = torch.arange(3 * _BLOCK // 4 + 3, dtype=torch.int32)

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != tensor.data_ptr():
                self.largest = max(self.largest, result.untyped_storage().nbytes())
            return result

    with Sizes() as sizes:
        found = checksum_of(tensor, 0)
    assert sizes.largest == 0
    tensor[-1] ^= 1
    assert checksum_of(tensor, 0) != found
    tensor[-1] ^= 1
    tensor[5] ^= 1 << 30
    assert checksum_of(tensor, 0) != found


def test_the_sum_that_ranks_compare_sees_the_order_of_rows():
    rows = torch.randn(8, 64)
    assert checksum_of(rows, 0) != checksum_of(rows.flip(0), 0) and checksum_of(rows, 0) == checksum_of(rows.clone(), 0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # signs are the top bits of words
        values = torch.randn(8, 8).to(dtype)
        signs = values.clone()
        signs[:, [1, 3]] *= -1
        assert len({checksum_of(tensor, 0) for tensor in (values, signs, -values)}) == 3
    flags = torch.zeros(7, dtype=torch.bool)
    assert checksum_of(flags, 0) != checksum_of(torch.ones_like(flags), 0)


def test_the_models_of_an_optimizer_are_compared_in_one_order_on_all_ranks():
    """In that in which they were sharded. Eight: a set, whose order follows from addresses, has this one by chance once in 40,320."""
    with sw.init("dp_shard=1", device="cpu") as world:
        models = [sw.parallelize(nn.Linear(2, 2), world) for _ in range(8)]
        optim = torch.optim.SGD([p for model in reversed(models) for p in model.parameters()], lr=0.1)
        assert [runtime.module for runtime in stepped_by(optim)] == models
