"""Schedules: forwards of several micro-batches before their backwards give what one micro-batch after the other does."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UnsupportedError
from shardwise.parallel import runtime_of

LAYOUTS = [
    ({"dp_replicate": 2}, {}),
    ({"dp_shard": 2}, {}),
    ({"dp_shard": 2}, {"units": ("Block",)}),
    ({"dp_shard": 2}, {"units": ("Block",), "reshard_after_forward": False}),
    ({"dp_replicate": 2}, {"units": ("Block",), "engine": "fsdp2"}),
    ({"tp": 2}, {}),
]


def pairs(work):
    """Two forwards, then their backwards in the same order."""
    for i in range(0, work.num, 2):
        both = range(i, min(i + 2, work.num))
        for at in both:
            work.forward(at)
        for at in both:
            work.backward(at)


def all_forwards_first(work):
    """And the backwards from the last one to the first."""
    for i in range(work.num):
        work.forward(i)
    for i in reversed(range(work.num)):
        work.backward(i)


class Noise(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + torch.rand(()).double())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.batch_norm = nn.Dropout(0.3), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x))))) * self.scale


class Skips(nn.Module):
    """Leaves a block out for some of the inputs, so that ranks and micro-batches run others; counts its forwards."""

    def __init__(self, skips=True):
        super().__init__()
        self.skips = skips
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids):
        self.calls += 1
        x = Noise.apply(self.embed(input_ids))
        for i, block in enumerate(self.blocks):
            if not (self.skips and i == int(input_ids[0, 0]) % 4):
                x = block(x)
        return self.head(x)


def batch(i):
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(i))
    labels = torch.where(torch.arange(5) < 2 + i % 4, ids.roll(-1, 1), -100)
    return {"input_ids": ids, "labels": labels}


def trained(layout, schedule, again, sharding):
    """Losses, gradient norms and parameters of two windows of three micro-batches, the last a padding on the last rank."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(
            lambda: Skips(skips=world.layout.tp == 1).double(),
            world,
            example=batch(0),
            sharding=sw.Sharding(buffers={"calls": "sum"}, **sharding),
            remat=sw.Remat(targets=("Block",)) if again else None,
        )
        runtime_of(model).schedule = schedule
        data = world.axis("dp")
        step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=0.5)
        found = []
        for window in range(3):
            odd = sw.MicroBatch(batch(40 + window), index=4, padding=data.rank == 1)
            mine = [batch(10 * window + data.rank), batch(10 * window + 4 + data.rank)]
            out = step([odd, *mine] if window == 1 else [*mine, odd])
            found += [out.loss, out.grad_norm]
        return found, sw.full_state_dict(model)


@pytest.mark.quick("layout5-sharding5-True", "layout6-sharding6-False")
@pytest.mark.parametrize(
    ("layout", "sharding", "again"),
    [
        *((layout, sharding, True) for layout, sharding in LAYOUTS),
        (*LAYOUTS[0], False),
        *(pytest.param(*case, False, marks=pytest.mark.soak) for case in LAYOUTS[1:]),
    ],
)
def test_forwards_before_backwards_train_the_same(ranks, layout, sharding, again):
    expected, weights = ranks.run(trained, 2, layout, None, again, sharding)[0]
    for schedule in (pairs, all_forwards_first):
        found, now = ranks.run(trained, 2, layout, schedule, again, sharding)[0]
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-12
        for name, value in weights.items():
            assert torch.allclose(now[name], value, rtol=1e-12, atol=1e-13), name


class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return lambda: self.b(y)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(11, 8), nn.ModuleList([Hides(), Hides()]), nn.Linear(8, 11)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)()
        return self.head(x)


def hidden(schedule):
    with sw.init("dp_shard=2", device="cpu") as world:
        sharding = sw.Sharding(units=("blocks.*",))
        model = sw.parallelize(lambda: Holder().double(), world, sharding=sharding)
        runtime_of(model).schedule = schedule
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            return step([batch(world.rank), batch(4 + world.rank)]).loss
        except UnsupportedError as error:
            return error.name, str(error)


def test_a_block_whose_output_hides_tensors_is_refused_between_others(ranks):
    assert isinstance(ranks.run(hidden, 2, None)[0], float)
    for name, told in ranks.run(hidden, 2, pairs):
        assert name == "blocks.0" and "another micro-batch" in told
