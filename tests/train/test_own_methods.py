"""A model's own pre_optimizer_step, post_optimizer_step and make_parameter_groups are used where they exist."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.config.schema import Optim
from shardwise.parallel import parallelize
from shardwise.train.parts import make_optimizer
from shardwise.train.step import TrainStep
from shardwise.world import init


class Part(nn.Linear):
    """Counts its steps, and halves its weight before each."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls = []

    def pre_optimizer_step(self) -> None:
        self.calls.append(("pre", self.weight.grad is not None))
        with torch.no_grad():
            self.weight.mul_(0.5)

    def post_optimizer_step(self) -> None:
        self.calls.append(("post", self.weight.grad is not None))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.head(x)

    def make_parameter_groups(self):
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        return [
            {"params": [p for p in self.parameters() if p.dim() > 1], "lr": 0.5},
            {"params": biases, "weight_decay": 0.0},
        ]


class Outer(Net):
    """Its own method calls those inside, so they are not called a second time."""

    def pre_optimizer_step(self) -> None:
        for part in self.parts:
            part.pre_optimizer_step()


def sum_loss(logits, batch):
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


def batch(rank):
    return {"x": torch.full((2, 4), 1.0 + rank, dtype=torch.float64), "labels": torch.tensor([0, 2])}


def train(layout, cls):
    with init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        model = parallelize(cls().double(), world)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
        size = 2 // world.size
        step([batch(world.rank * size + i) for i in range(size)])
        weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
        return {name: w.detach().clone() for name, w in weights.items()}, [part.calls for part in model.parts]


@pytest.mark.parametrize("cls", [Net, Outer])
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_each_is_called_once_around_the_step(ranks, layout, cls):
    torch.manual_seed(0)
    plain = cls().double()
    tokens = 4
    for rank in range(2):
        given = batch(rank)
        (sum_loss(plain(given["x"]), given) / tokens).backward()
    for part in plain.parts:
        part.pre_optimizer_step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for weights, calls in ranks.run(train, 2, layout, cls):
        assert calls == [[("pre", True), ("post", True)]] * 2
        for name, param in plain.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-12, atol=1e-14)


def groups():
    with init("dp_shard=1", device="cpu") as world:
        optim = make_optimizer(Optim(lr=0.1, weight_decay=0.2), parallelize(Net, world))
        return [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optim.param_groups]


def test_the_models_own_groups_are_the_optimizers(ranks):
    assert ranks.run(groups, 1)[0] == [(3, 0.5, 0.2), (2, 0.1, 0.0)]
