"""A model's own pre_optimizer_step, post_optimizer_step and make_parameter_groups are used where they exist."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.parallel import parallelize
from shardwise.run.config import Optim
from shardwise.run.optim import make_optimizer
from shardwise.step.step import TrainStep
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


def trained_in_groups(layout, wrapped):
    """A user's script: the model's own groups, in a loop of TrainStep, alone or inside of a task with a loss of its own."""
    with init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        net = sw.TaskModel(Net().double(), Scaled()) if wrapped else Net().double()
        model = parallelize(net, world)
        groups = sw.parameter_groups(model)
        step = TrainStep(model, torch.optim.SGD(groups, lr=0.1), loss=None if wrapped else sum_loss, count=lambda b: 2)
        size = 2 // world.size
        step([batch(world.rank * size + i) for i in range(size)])
        weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
        return {name: w.detach().clone() for name, w in weights.items()}, [len(group["params"]) for group in groups]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, logits, batch):
        return sum_loss(logits, batch) * self.scale.sum()


@pytest.mark.parametrize(
    ("layout", "wrapped"), [("dp_shard=2", False), ("dp_shard=2", True), ("dp_replicate=2", False)]
)
def test_the_models_own_groups_in_python(ranks, layout, wrapped):
    torch.manual_seed(0)
    plain = sw.TaskModel(Net().double(), Scaled()) if wrapped else Net().double()
    for rank in range(2):
        given = batch(rank)
        ((plain(given) if wrapped else sum_loss(plain(given["x"]), given)) / 4).backward()
    net = plain.model if wrapped else plain
    for part in net.parts:
        part.pre_optimizer_step()
    rest = [{"params": plain.loss.parameters()}] if wrapped else []
    torch.optim.SGD(net.make_parameter_groups() + rest, lr=0.1).step()
    for weights, sizes in ranks.run(trained_in_groups, 2, layout, wrapped):
        assert sizes == ([3, 2, 1] if wrapped else [3, 2])
        for name, param in plain.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-12, atol=1e-14)


def groups():
    with init("dp_shard=1", device="cpu") as world:
        optim = make_optimizer(Optim(lr=0.1, weight_decay=0.2), parallelize(Net, world))
        return [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optim.param_groups]


def test_the_models_own_groups_are_the_optimizers(ranks):
    assert ranks.run(groups, 1)[0] == [(3, 0.5, 0.2), (2, 0.1, 0.0)]


class Alone(nn.Linear):
    """Its groups are whatever it is told to return."""

    def __init__(self, made):
        super().__init__(2, 2)
        self.made = made

    def make_parameter_groups(self):
        return self.made(self)


def kinds():
    said = {}
    with init("dp_shard=1", device="cpu") as world:

        def of(made):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    found = sw.parameter_groups(parallelize(Alone(made), world, sharding=sw.Sharding(engine="fsdp2")))
                except sw.UsageError as error:
                    return str(error)
            return [(len(group["params"]), *map(str, sorted(set(group) - {"params"}))) for group in found], [
                str(warning.message) for warning in warned if "leaves out" in str(warning.message)
            ]

        said["list"] = of(lambda self: list(self.parameters()))
        said["generator"] = of(lambda self: self.parameters())
        said["named"] = of(lambda self: self.named_parameters())
        said["one group"] = of(lambda self: {"params": self.parameters(), "lr": 1.0})
        said["one tensor each"] = of(lambda self: [{"params": self.weight}, {"params": self.bias, "lr": 1.0}])
        said["part"] = of(lambda self: [self.weight])
        said["twice"] = of(lambda self: [{"params": [self.weight]}, {"params": self.parameters()}])
        kept = nn.Parameter(torch.zeros(2))
        said["another"] = of(lambda self: [kept])
    return said


def test_what_groups_may_be_and_what_is_refused(ranks):
    said = ranks.run(kinds, 1)[0]
    for kind in ("list", "generator", "named"):
        assert said[kind] == ([(2,)], [])
    assert said["one group"] == ([(2, "lr")], [])
    assert said["one tensor each"] == ([(1,), (1, "lr")], [])
    groups, (warned,) = said["part"]
    assert groups == [(1,)] and "leaves out bias, which the optimizer will not change" in warned
    assert "weight" in said["twice"] and "a parameter twice" in said["twice"]
    assert "kept from before parallelize" in said["another"]
    with pytest.raises(sw.UsageError, match="parallelize"):
        sw.parameter_groups(Net())
