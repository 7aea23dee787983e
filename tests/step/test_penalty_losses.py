"""Losses and reductions of torch as penalties on parameters that are cut: values and gradients of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

LOSSES = {
    "mse": F.mse_loss,
    "mse of a transposed": lambda p, s: F.mse_loss(p.t(), s.t()),
    "mse of sums": lambda p, s: F.mse_loss(p.sum(0), s.sum(0)),
    "mse, summed": lambda p, s: F.mse_loss(p, s, reduction="sum"),
    "mse, each": lambda p, s: F.mse_loss(p, s, reduction="none").mean(),
    "huber": F.huber_loss,
    "smooth l1": F.smooth_l1_loss,
    "cross entropy of bits": lambda p, s: F.binary_cross_entropy(p.sigmoid(), s.sigmoid(), weight=s.abs()),
    "with logits": lambda p, s: F.binary_cross_entropy_with_logits(p, s.sigmoid()),
    "soft margin": lambda p, s: F.soft_margin_loss(p, s.sign()),
    "largest": lambda p, s: p.amax(),
    "smallest": lambda p, s: p.amin(),
    "largest of all": lambda p, s: (p / p.norm(float("inf"))).square().sum(),
    "over all dims": lambda p, s: p.sum(dim=()) * p.square().sum(dim=()),
    "fewer rows": lambda p, s: p.gather(1, s[:-2].square().argsort(1)).square().sum(),
    "cumulative": lambda p, s: (p.cumsum(-2) * s).square().sum() + p.detach().exp().cumprod(-2).sum() * p.sum(),
    "if any": lambda p, s: ((p > s).any() == True).double() * p.square().sum() * (p > 0).any(-2).double().sum(),  # noqa: E712
    "beside others": lambda p, s: F.mse_loss(p, s) * p.square().sum() + p.norm(),
}


def linear(rows: int) -> nn.Linear:
    torch.manual_seed(rows)
    layer = nn.Linear(4, rows, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight[-1, 1:3] = torch.tensor([9.0, -9.0])  # the extremes are on the last rank, and norm(inf) has two
    return layer


def target(weight: Tensor) -> Tensor:
    return weight.detach() * 0.9 + 0.1


def penalised(layout: str, rows: int):
    found = {}
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(linear(rows), world, sharding=sw.Sharding(min_unit_bytes=0))
        for name, loss in LOSSES.items():
            model.zero_grad()
            with sw.window(model, [{"x": torch.ones(2, 4)}], count=len) as window:
                penalty = loss(model.weight, target(model.weight))
                sw.parameter_penalty(model, penalty)
                for _ in window:
                    pass
            found[name] = sw.full_tensor(penalty).detach(), sw.full_tensor(model.weight.grad).clone()
    return found


@pytest.mark.parametrize("layout", ["dp_shard=2", pytest.param("dp_replicate=2,dp_shard=2", marks=pytest.mark.soak)])
def test_a_loss_of_torch_as_a_penalty(ranks, layout):
    """torch's rules divide a mean by the elements of this rank: gradients were those of one process times the number of ranks, and
    values were wrong too where ranks have unequal numbers of rows. They take dim=[], which the backward of amax() has, for no dim: gradients
    were NaN where the largest element was not on the first rank."""
    num = 2 if layout == "dp_shard=2" else 4
    for rows in (6, 5) if num == 2 else (5,):
        for found in ranks.run(penalised, num, layout, rows):
            for name, loss in LOSSES.items():
                weight = linear(rows).weight
                value = loss(weight, target(weight))
                for mine, want in zip(found[name], (value, *torch.autograd.grad(value, weight)), strict=True):
                    assert (mine - want).abs().max() <= 1e-12 * want.abs().max(), (rows, name)
