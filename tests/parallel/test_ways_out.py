"""What people do with several models, methods and averages of weights: refused by name, and what the fix names has the numbers of
one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ShardwiseError

pytestmark = [pytest.mark.timeout(60)]

LAYOUTS = {  # layout, and options of sharding
    "one unit": ("dp_shard=2", {"units": "none"}),
    "many units": ("dp_shard=2", {"min_unit_bytes": 0}),
    "replicas": ("dp_replicate=2", {}),
}
BATCHES = [{"x": torch.full((2, 4), 0.5 + rank, dtype=torch.float64)} for rank in range(2)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def build(kind: Any = Net) -> Any:
    torch.manual_seed(0)
    return kind().double()


def said_of(call: Any) -> ShardwiseError | None:
    try:
        call()
    except ShardwiseError as error:
        return error
    return None


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


# ---- two models that share a module -----------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two models over one encoder, as the fix says: one module that holds both."""

    def __init__(self):
        super().__init__()
        encoder = nn.Linear(4, 4)
        self.first = nn.Sequential(encoder, nn.Tanh(), nn.Linear(4, 3))
        self.second = nn.Sequential(encoder, nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def loss_of_two(model: Two, batch: dict[str, Tensor]) -> Tensor:
    first, second = model(batch["x"])
    return first.square().sum() + second.square().sum()


def shared(layout: str, options: dict) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        sharding = sw.Sharding(**options)
        apart = build(Two)
        sw.parallelize(apart.first, world, sharding=sharding)
        said = said_of(lambda: sw.parallelize(apart.second, world, sharding=sharding))
        model = sw.parallelize(build(Two), world, sharding=sharding)
        with sw.window(model, [BATCHES[world.rank]], count=len) as w:
            for batch in w:
                loss_of_two(model, batch).backward()
        return said, {name: whole(param.grad) for name, param in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_models_that_share_a_module(ranks, layout):
    """It was said to be another library's, or to have a hook that nobody had put there."""
    plain = build(Two)
    for batch in BATCHES:
        loss_of_two(plain, batch).backward()
    for said, grads in ranks.run(shared, 2, *LAYOUTS[layout]):
        assert said.given == "a part of a model that was parallelized already" and said.name == "0.weight", said
        assert "into one module" in said.fix
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})
