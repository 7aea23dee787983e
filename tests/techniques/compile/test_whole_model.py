"""A model that the user has compiled as a whole, with replicas: its graph does not show the model's own output."""

import pytest
import torch
from torch import nn

import shardwise as sw


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def inputs(rank, is_same):
    return torch.full((5, 4), 1.0 if is_same else 1.0 + rank, dtype=torch.float64)


def gradients(layout, compiles, is_same):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(
            build(), world, **({"compile": sw.Compile(backend="eager")} if compiles == "blocks" else {})
        )
        called = model
        if compiles == "in place":
            model.compile(backend="aot_eager")
        elif compiles == "a wrapper":
            called = torch.compile(model, backend="aot_eager")
        x = inputs(world.rank, is_same)
        with sw.window(model, [{"x": x}], count=lambda batch: 5) as window:
            for batch in window:
                (called(batch["x"]).square().sum() / window.num_tokens).backward()
        return [param.grad.clone() for param in model.parameters()]


@pytest.mark.quick("nothing-True", "in place-True", "a wrapper-True")
@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("compiles", ["nothing", "blocks", "in place", "a wrapper"])
def test_equal_data_on_every_rank_counts_for_each(ranks, compiles, is_same):
    plain = build()
    for rank in range(2):
        (plain(inputs(rank, is_same)).square().sum() / 10).backward()
    for found in ranks.run(gradients, 2, "dp_replicate=2", compiles, is_same):
        for grad, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-12, atol=1e-14)
