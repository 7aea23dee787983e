"""A model that the user has compiled as a whole: with replicas its backwards cannot be told from a penalty's, and are refused."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UnsupportedError


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def gradients_or_error(layout, compiles):
    """On the same data on every rank."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(
            build(), world, **({"compile": sw.Compile(backend="eager")} if compiles == "blocks" else {})
        )
        called = model
        if compiles == "in place":
            model.compile(backend="eager")
        elif compiles == "a wrapper":
            called = torch.compile(model, backend="eager")
        x = torch.ones(5, 4, dtype=torch.float64)
        try:
            with sw.window(model, [{"x": x}], count=lambda batch: 5) as window:
                for batch in window:
                    (called(batch["x"]).square().sum() / window.num_tokens).backward()
        except UnsupportedError as error:
            return str(error)
        return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("compiles", ["nothing", "blocks", "in place", "a wrapper"])
def test_equal_data_on_every_rank_counts_for_each_or_is_refused(ranks, compiles):
    plain = build()
    (plain(torch.ones(5, 4, dtype=torch.float64)).square().sum() / 5).backward()
    for found in ranks.run(gradients_or_error, 2, "dp_replicate=2", compiles):
        if compiles in ("in place", "a wrapper"):
            assert "torch.compile compiled as a whole" in found and 'compile="blocks"' in found
        else:
            for grad, param in zip(found, plain.parameters(), strict=True):
                torch.testing.assert_close(grad, param.grad, rtol=1e-12, atol=1e-14)
