"""A world on torch's fake group: one process sees what a rank of any number of them would hold."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardwise import Sharding
from shardwise._torch.dtensor import local_tensor
from shardwise._torch.version import fake_groups_compute
from shardwise.errors import UnsupportedError
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.recipe import extents
from shardwise.step.clip import clip_grad_norm_
from shardwise.step.step import TrainStep
from shardwise.world import init


class Net(nn.Module):
    """Even and uneven rows, fewer rows than ranks, a 0-dim parameter, a frozen one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(67, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 30), nn.Tanh(), nn.Linear(30, 16)) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(5, 3), requires_grad=False)
        self.head = nn.Linear(16, 67, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


def imagined_norms(size: int) -> list[float]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        with init("dp_replicate=-1", device="cpu") as world:
            model = parallelize(nn.Linear(4, 4), world)
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5)
            return [float(clip_grad_norm_(model, 1e9, norm_type=math.inf)) for _ in range(2)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 3, 64])
def test_the_largest_element_does_not_grow_with_the_ranks(ranks, size):
    assert ranks.run(imagined_norms, 1, size)[0] == pytest.approx([0.5, 0.5], rel=1e-12)


def imagined(size: int, rank: int, layout: str):
    """What rank ``rank`` of ``size`` holds: name -> shape, ours, raw FSDP2's, and by the recipe; and a step's loss."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        with init(layout, device="cpu") as world:
            sharding = Sharding(min_unit_bytes=0)
            model = parallelize(Net, world, sharding=sharding)
            ours = {name: tuple(local_tensor(p).shape) for name, p in runtime_of(model).parameters.items()}
            raw = Net()
            mesh = world.mesh if world.layout.dp_replicate > 1 else world.mesh["dp_shard"]
            for block in raw.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(raw, mesh=mesh, ignored_params={raw.scale})
            theirs = {name: tuple(local_tensor(p).shape) for name, p in raw.named_parameters()}
            params, coord = recipe_of(model).params, runtime_of(model).view.coord
            planned = {name: [piece.sizes for piece in extents(param, coord)] for name, param in params.items()}
            loss = 0.0
            if fake_groups_compute():
                step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0)
                ids = torch.arange(8).view(1, 8)
                loss = step([{"input_ids": ids, "labels": ids + 1}]).loss
        assert dist.is_initialized()  # the group was there before: closing the world leaves it
    finally:
        dist.destroy_process_group()
    return ours, theirs, planned, loss


@pytest.mark.quick("8-7-dp_shard=8", "64-9-dp_replicate=4,dp_shard=16", "8192-66-dp_shard=-1")
@pytest.mark.parametrize(
    ("size", "rank", "layout"),
    [
        (8, 0, "dp_shard=8"),
        (8, 7, "dp_shard=8"),
        (64, 9, "dp_replicate=4,dp_shard=16"),
        (8192, 0, "dp_shard=-1"),
        (8192, 66, "dp_shard=-1"),
    ],
)
def test_a_rank_of_many_is_imagined_in_one_process(ranks, size, rank, layout):
    ours, theirs, planned, loss = ranks.run(imagined, 1, size, rank, layout)[0]
    assert ours == theirs
    for name, shape in ours.items():
        (piece,) = planned[name] or [None]
        assert shape == piece if piece is not None else 0 in shape
    assert loss == pytest.approx(loss)  # a number: not NaN


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_no_step_is_taken_with_memory_that_nothing_has_written(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with init("dp_shard=8", backend="fake", device="cpu") as world:
        step = TrainStep(model := parallelize(Net, world), torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UnsupportedError, match=r'a training step with backend="fake" on torch 2\.1'):
            step([{"input_ids": torch.zeros(1, 2, dtype=torch.long), "labels": torch.ones(1, 2, dtype=torch.long)}])
