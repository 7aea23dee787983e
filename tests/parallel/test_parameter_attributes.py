"""What the user has set on parameters, ``A_log._no_weight_decay = True``, is on those that sharding puts in their place."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UnsupportedError


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.tied = nn.Linear(32, 8, bias=False)
        self.tied.weight = self.down.weight
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.up.weight.lr_scale = 0.5
        self.down.weight._no_weight_decay = True
        self.gain.optim = self.frozen.optim = {"lr": 0.1}

    def forward(self, x):
        h = torch.relu(self.up(x) * self.up.weight.lr_scale)
        scale = 2.0 if getattr(self.tied.weight, "_no_weight_decay", False) else 1.0
        return self.down(h) * self.gain * self.frozen + self.tied(h) * scale * self.frozen.optim["lr"]


ATTRIBUTES = {
    "up.weight": {"lr_scale": 0.5},
    "up.bias": {},
    "down.weight": {"_no_weight_decay": True},
    "down.bias": {},
    "gain": {"optim": {"lr": 0.1}},
    "frozen": {"optim": {"lr": 0.1}},
}


def users(param):
    return {key: value for key, value in vars(param).items() if key in ("lr_scale", "_no_weight_decay", "optim")}


def sharded(layout, how, precision):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(1)
        made = Scaled if how == "function" else Scaled()
        options = {} if "tp" in layout else {"sharding": sw.Sharding(min_unit_bytes=0)}
        model = sw.parallelize(made, world, example={"x": torch.ones(4, 8)}, precision=precision, **options)
        found = []
        for _ in range(2):
            with sw.window(model, [{"x": torch.ones(2, 8)}], count=len) as window:
                for given in window:
                    (model(**given).square().sum() / world.size).backward()
            found.append({name: users(param) for name, param in model.named_parameters()})
            model.zero_grad()
        out = model(torch.ones(2, 8)).detach()
        plain = Scaled()
        with torch.no_grad():
            for name, param in model.named_parameters():
                plain.get_parameter(name).copy_(sw.full_tensor(param))
        return found, out.float(), plain(torch.ones(2, 8)).detach()


@pytest.mark.parametrize(
    ("layout", "how", "precision"),
    [
        ("dp_shard=2", "module", None),
        ("dp_shard=2", "function", "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in [
                ("dp_replicate=2", "function", None),
                ("tp=2", "module", None),
                ("dp_shard=1", "function", "bf16"),
            ]
        ),
    ],
)
def test_attributes_of_parameters_stay(ranks, layout, how, precision):
    """Groups of parameters are made by them, for weight decay and learning rates: all were in one group, and nothing said so."""
    for found, out, want in ranks.run(sharded, 1 if layout.endswith("=1") else 2, layout, how, precision):
        assert found == [ATTRIBUTES] * 2
        torch.testing.assert_close(out, want, rtol=0.05 if precision else 1e-5, atol=0.05 if precision else 1e-6)


class Doubling(nn.Parameter):
    @property
    def twice(self):
        return self * 2


class OfAClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = Doubling(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.w.twice


def of_a_class(layout):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        found = []
        for model in (OfAClass(), OfAClass):
            try:
                found.append(type(sw.parallelize(model, world, example={"x": torch.ones(4, 4)}).w).__name__)
            except UnsupportedError as error:
                found.append(str(error))
        return found


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_class_of_parameters(ranks, layout):
    for module, function in ranks.run(of_a_class, 2, layout):
        assert function.startswith("w: a parameter of the class Doubling") and "is_scale = True" in function
        assert module == (function if layout == "dp_shard=2" else "Doubling")
