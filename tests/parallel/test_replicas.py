"""Ranks along tp hold some parameters whole: their gradients are compared early in a run, in every kind of loop."""

from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import replicas

LOOPS = ("window", "accumulate")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def gradients(loop, off, precision="fp64", layout="tp=2"):
    """Gradients of a norm, whole, after rank ``r`` along tp has added ``off`` r times to it in a backward; or the error."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(3)
        model = sw.parallelize(
            nn.Sequential(Block(), Block()), world, precision=precision, example={"input": torch.randn(4, 16)}
        )
        optim, weight = torch.optim.SGD(model.parameters(), lr=0.1), model.get_parameter("0.norm.weight")
        x = torch.randn(4, 16, dtype=torch.float64 if precision == "fp64" else torch.float32)

        def backward():
            def shift(param):
                param.grad.add_(off * world.axis("tp").rank)

            hook = weight.register_post_accumulate_grad_hook(shift)
            model(x).float().square().mean().backward()
            hook.remove()

        try:
            with mock.patch.object(replicas, "_AT_ONCE", 5):
                if loop == "window":
                    with sw.window(model, [{"x": x}], count=lambda batch: len(batch["x"])) as window:
                        for _ in window:
                            backward()
                else:
                    with sw.accumulate(model, is_last=True):
                        backward()
                optim.step()
        except sw.RankError as error:
            return str(error)
        return sw.full_tensor(weight.grad).tolist()


@pytest.mark.parametrize("loop", LOOPS)
def test_what_differs_by_rounding_is_made_equal(ranks, loop):
    first, second = ranks.run(gradients, 2, loop, 1e-13)
    exact, _ = ranks.run(gradients, 2, loop, 0.0)
    assert first == second != exact
    assert first == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(("precision", "off"), [("fp64", 1e-6), ("fp32", 1e-3), ("bf16", 1.0)])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_differs_by_more_is_named(ranks, loop, precision, off):
    for text in ranks.run(gradients, 2, loop, off, precision):
        assert text.startswith("0.norm.weight: ranks 0, 1 with other gradients")


def test_what_is_computed_in_bfloat16_may_differ_as_its_rounding_does(ranks):
    first, second = ranks.run(gradients, 2, "window", 1e-4, "bf16")
    assert first == second


def test_beside_data_ranks(ranks):
    for text in ranks.run(gradients, 4, "window", 1e-6, "fp64", "dp_shard=2,tp=2"):
        assert text.startswith("0.norm.weight: ranks ")
    found = ranks.run(gradients, 4, "window", 1e-13, "fp64", "dp_shard=2,tp=2")
    assert all(each == found[0] for each in found)


def without_a_part(layout, precision):
    """Whether it is noticed that the last rank along tp has nothing of a gradient, for eight models; data ranks have other data."""
    noticed = 0
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        for seed in range(8):
            torch.manual_seed(seed)
            x = torch.randn(4, 16)
            model = sw.parallelize(nn.Sequential(Block(), Block()), world, precision=precision, example={"input": x})
            tp, weight = world.axis("tp"), model.get_parameter("0.norm.weight")

            def without(param, is_there=tp.rank < tp.size - 1):
                param.grad.mul_(is_there)

            try:
                with sw.window(
                    model, [{"x": x + world.axis("dp").rank}], count=lambda batch: len(batch["x"])
                ) as window:
                    for batch in window:
                        hook = weight.register_post_accumulate_grad_hook(without)
                        model(batch["x"]).float().square().mean().backward()
                        hook.remove()
            except sw.RankError:
                noticed += 1
    return noticed


@pytest.mark.quick("tp=2-fp32", "dp_replicate=2,tp=2-bf16")
@pytest.mark.parametrize(
    ("layout", "precision"),
    [("tp=2", "fp32"), ("tp=4", "bf16"), ("dp_shard=2,tp=2", "bf16"), ("dp_replicate=2,tp=2", "bf16")],
)
def test_a_part_that_is_missing_is_seen_in_every_precision(ranks, layout, precision):
    found = ranks.run(without_a_part, 2 if layout == "tp=2" else 4, layout, precision)
    assert min(found) == max(found) >= 6
