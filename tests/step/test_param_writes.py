"""A forward that writes the model's parameters: refused by name where that is lost or differs by rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Precision, Sharding
from shardwise.errors import UnsupportedError, UsageError
from shardwise.parallel import parallelize
from shardwise.step.step import TrainStep
from shardwise.step.window import window
from shardwise.world import init

pytestmark = pytest.mark.timeout(60)
LAYOUTS = [
    ("dp_shard=2", 2, "fsdp2"),
    ("dp_shard=1", 1, "fsdp2"),
    ("dp_replicate=2", 2, "ddp"),
    ("dp_shard=1", 1, "ddp"),
]


class Table(nn.Module):
    def __init__(self, table: nn.Module):
        super().__init__()
        self.table, self.head = table, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


class Writes(nn.Module):
    """Normalises its weight before it uses it, or scales it by its input."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "normalised":
                self.weight.copy_(F.normalize(self.weight))
            elif self.how == "by the batch":
                self.weight.mul_(1 + x.mean())
            elif self.how == "through .data":
                self.weight.data.copy_(F.normalize(self.weight.data))
            elif self.how == "replaced":
                self.weight = nn.Parameter(F.normalize(self.weight.detach()))
        return torch.tanh(x @ self.weight)


class Net(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.blocks = nn.ModuleList([Writes("not"), Writes(how), Writes("not")])
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def with_max_norm(kind: str, layout: str, engine: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        table = getattr(nn, kind)(7, 4, max_norm=1.0)
        try:
            parallelize(Table(table), world, sharding=Sharding(engine=engine))
        except UnsupportedError as error:
            return error.name, error.given
        return None


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize(("layout", "size", "engine"), LAYOUTS)
def test_max_norm_is_refused_by_name(ranks, kind, layout, size, engine):
    alone = size == 1 and engine == "ddp"
    for said in ranks.run(with_max_norm, size, kind, layout, engine):
        assert said == (None if alone else ("table", f"a {kind} with max_norm=1.0"))


def train(how: str, layout: str, engine: str, options: dict):
    """Parameters after two windows, or what was said."""
    with init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        keep = {} if engine == "ddp" else {"min_unit_bytes": 0}
        sharding = Sharding(engine=engine, **keep, **options.get("sharding", {}))
        model = parallelize(Net(how), world, sharding=sharding, precision=options.get("precision"))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for _ in range(2):
                with window(model, [{"x": torch.full((2, 4), 0.1 + world.rank)}] * 2, count=len) as w:
                    for batch in w:
                        (model(batch["x"]).float().sum() / w.num_tokens).backward()
                optim.step()
                optim.zero_grad()
        except UnsupportedError as error:
            return error.name, error.given, error.why
        return [param.detach() for param in model.parameters()] if engine == "ddp" else None


@pytest.mark.parametrize("how", ["normalised", "by the batch", "through .data", "replaced"])
@pytest.mark.parametrize(("layout", "size", "engine"), LAYOUTS)
def test_a_parameter_written_in_forward(ranks, how, layout, size, engine):
    """Under replicas a write that is the same on every rank is right."""
    if how == "replaced" and engine == "ddp":
        return  # refused by another name: tests/parallel/test_changed_modules.py
    found = ranks.run(train, size, how, layout, engine, {})
    if engine == "fsdp2" or (size > 1 and how == "by the batch"):
        for said in found:
            assert said[0] == "blocks.1.weight" and "writes in place" in said[1]
            assert ("lost" in said[2]) == (engine == "fsdp2")
    else:
        for params in found:
            assert all(torch.equal(a, b) for a, b in zip(params, found[0], strict=True))


@pytest.mark.quick(
    "{'precision': 'bf16'}",
    "{'precision': Precision(storage=None, compute=None, reduce='float64', output=None, cast_inputs='root', parts={})}",
    "{'sharding': {'offload': True}}",
    "{'sharding': {'reshard_after_forward': False}}",
)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": Precision(reduce="float64")},
        {"sharding": {"offload": True}},
        {"sharding": {"reshard_after_forward": False}},
        {"sharding": {"sync_every_microbatch": True}},
    ],
    ids=str,
)
def test_what_fsdp2_writes_itself_is_not_taken_for_it(ranks, options):
    for layout, size in (("dp_shard=2", 2), ("dp_shard=1", 1)):
        assert ranks.run(train, size, "not", layout, "fsdp2", options) == [None] * size


def one_rank_writes(layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(Net("by the batch" if world.is_main else "not"), world, sharding=Sharding(min_unit_bytes=0))
        step = TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out, _: out.sum(), count=len, forward=apply
        )
        try:
            step([{"x": torch.ones(2, 4)}])
        except UnsupportedError as error:
            return error.name
        return None


def apply(model: nn.Module, batch: dict) -> Tensor:
    return model(batch["x"])


def test_a_write_by_one_rank_is_told_on_all(ranks):
    for layout in ("dp_shard=2", "dp_replicate=2"):
        assert ranks.run(one_rank_writes, 2, layout) == ["blocks.1.weight"] * 2


class Keeps(nn.Module):
    """Keeps a view of its weight, in the block or in a list of it."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.layer, self.seen = how, nn.Linear(4, 4), []

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detached":
            self.view = self.layer.weight.detach()
        else:
            self.seen.append(self.layer.weight.data)
        return self.layer(x)


def with_a_view(how: str, layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(
            nn.Sequential(nn.ModuleList([Keeps(how)])[0], nn.Linear(4, 2)), world, sharding=Sharding(min_unit_bytes=0)
        )
        step = TrainStep(
            model, torch.optim.SGD(model.parameters()), loss=lambda y, _: y.square().sum(), count=lambda b: 2
        )
        try:
            for _ in range(3):
                step([{"x": torch.ones(2, 4)}])
        except UsageError as error:
            return str(error)
        return "nothing was raised"


@pytest.mark.parametrize("how", ["detached", "data in a list"])
def test_a_view_of_a_gathered_weight_that_a_forward_keeps_is_refused(ranks, how):
    """Our own look at what modules keep read memory that was freed, and the process ended by a signal."""
    for told in ranks.run(with_a_view, 2, how, "dp_shard=2"):
        assert "a tensor of shape [4, 4] that a Keeps keeps" in told and "weight.detach().clone()" in told
    assert ranks.run(with_a_view, 2, how, "dp_replicate=2") == ["nothing was raised"] * 2
