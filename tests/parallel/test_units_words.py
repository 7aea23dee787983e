"""Units that only the module can tell: by a function, by the model's hint, by its own fully_shard; each with parity."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shardwise.config.options import Sharding
from shardwise.errors import ConfigError, PlanError, UsageError
from shardwise.parallel import parallelize, recipe_of
from shardwise.train.window import window
from shardwise.world import init


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """As a library writes it: a hint, and a method that shards its layers, every second of which it keeps gathered."""

    _no_split_modules = ["Layer", "NotHere"]  # noqa: RUF012 - as Hugging Face writes it

    def __init__(self, num_layers: int = 4):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def fully_shard(self, *, reshard_after_forward: bool = True, **options) -> None:
        for i, layer in enumerate(self.layers):
            fully_shard(layer, reshard_after_forward=reshard_after_forward and i % 2 == 0, **options)


class OnlyWarns(Net):
    def fully_shard(self, **options) -> None:
        pass


def build() -> nn.Module:
    torch.manual_seed(2)
    return Net().double()


def sharded(cls: type[nn.Module], given, meta: bool = False, **more):
    """Units with what is freed, and the whole gradients; or the error."""
    with init("dp_shard=2", device="cpu", timeout_s=20) as world:
        try:
            model = parallelize(cls if meta else build() if cls is Net else cls(), world,
                                sharding=Sharding(units=given, **more))  # fmt: skip
        except (PlanError, UsageError, ConfigError) as error:
            return str(error)
        if meta:
            return {unit.name: unit.reshard for unit in recipe_of(model).units}, None
        with window(model, [{"x": torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)}], count=len) as w:
            for each in w:
                model(each["x"]).pow(2).sum().backward()
        grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        return {unit.name: unit.reshard for unit in recipe_of(model).units}, grads


def even_layers(name: str, module: nn.Module) -> bool:
    return isinstance(module, Layer) and int(name.rpartition(".")[2]) % 2 == 0


ALL = {f"layers.{i}": True for i in range(4)}


@pytest.mark.parametrize(
    ("given", "units"),
    [
        ("Layer", ALL),
        ("embed, Layer", {"embed": True, **ALL}),
        (f"{Layer.__module__}.Layer", ALL),
        (even_layers, {"layers.0": True, "layers.2": True}),
        ("no_split", ALL),
        ("model", {"layers.0": True, "layers.1": False, "layers.2": True, "layers.3": False}),
    ],
)
def test_units_and_gradients(ranks, given, units):
    plain = build()
    for rank in range(2):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).pow(2).sum().backward()
    for found, grads in ranks.run(sharded, 2, Net, given):
        assert found == {**units, "": False}
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


def test_the_models_own_way_on_meta(ranks):
    assert ranks.run(sharded, 2, Net, "model", True)[0][0]["layers.1"] is False


def never(name: str, module: nn.Module) -> bool:
    return False


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


@pytest.mark.parametrize(
    ("cls", "given", "more", "text"),
    [
        (Net, never, {}, "true for no module but the root"),
        (Plain, "no_split", {}, "has a list _no_split_modules"),
        (Plain, "model", {}, "it has no method fully_shard"),
        (OnlyWarns, "model", {}, "sharded none of its modules"),
        (Net, "model", {"reshard_every": 2}, "says for each unit when it is freed"),
        (Net, "torch.nn.Layer", {}, "matches no module's name and no module's class"),
        (Net, "auto", {"reshard_after_forward": {"Lairs": False}, "min_unit_bytes": 0}, "matches no module of a unit"),
        (Net, "auto", {"reshard_after_forward": {"layers.1": False}, "min_unit_bytes": 700}, "a unit is freed as one"),
    ],
)  # fmt: skip
def test_what_names_nothing_is_refused(ranks, cls, given, more, text):
    (said, _) = ranks.run(sharded, 2, cls, given, **more)
    assert text in said
