"""Modules that cannot be sharded as they are, and errors of torch's own: each told in our words, with what to do."""

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.options import Sharding
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.parallel import parallelize, runtime_of
from shardwise.train.window import window
from shardwise.world import init

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(8))


@pytest.mark.parametrize("how", ["module", None, "rank0"])
def test_a_lazy_module_is_refused_by_name(how):
    with init("dp_shard=1", device="cpu") as world, pytest.raises(UnsupportedError) as caught:
        parallelize(lazy() if how == "module" else lazy, world, init=None if how == "module" else how)
    assert caught.value.name == "1.weight" and "LazyLinear" in caught.value.given


@pytest.mark.parametrize("how", ["module", "callable"])
def test_a_compiled_module_is_refused(how):
    def build() -> nn.Module:
        return torch.compile(nn.Linear(4, 4))

    with init("dp_shard=1", device="cpu") as world, pytest.raises(UsageError) as caught:
        parallelize(build() if how == "module" else build, world)
    assert "torch.compile" in caught.value.given and "compile=" in caught.value.fix


def test_a_model_compiled_after_sharding_is_told_so():
    with init("dp_shard=1", device="cpu") as world, pytest.raises(UsageError) as caught:
        runtime_of(torch.compile(parallelize(nn.Linear(4, 4), world)))
    assert "torch.compile" in caught.value.given and "compile=" in caught.value.fix


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def not_gathered(what: str, layout: str):
    """What is said of a gradient penalty, or of a feature caught inside a block that the loss uses alone."""
    with init(layout, device="cpu", timeout_s=20) as world:
        keep = {} if "replicate" in layout else {"min_unit_bytes": 0}
        model = parallelize(Net(), world, sharding=Sharding(**keep))
        caught = []
        model.blocks[1][0].register_forward_hook(lambda _m, _a, output: caught.append(output))
        try:
            with window(model, [{"x": torch.ones(2, 4)}], count=len) as w:
                for batch in w:
                    x = batch["x"].clone().requires_grad_()
                    y = model(x).pow(2).sum()
                    if what == "penalty":
                        (slope,) = torch.autograd.grad(y, x, create_graph=True)
                        y = slope.pow(2).sum()
                    else:
                        y = caught[0].pow(2).sum()
                    y.backward()
        except ShardwiseError as error:
            return type(error).__name__, error.given
        return None


@pytest.mark.parametrize("what", ["penalty", "feature"])
def test_a_gradient_of_a_gradient_is_explained(ranks, what):
    assert ranks.run(not_gathered, 2, what, "dp_replicate=2") == [None, None]
    for said in ranks.run(not_gathered, 2, what, "dp_shard=2"):
        assert said == ("UnsupportedError", "a backward that reaches a unit whose parameters are not gathered")
