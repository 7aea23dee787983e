"""The arguments of torch's DistributedDataParallel: each is an option here, or refused with what is done in its place."""

import inspect
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw


def test_every_argument_is_an_option_or_named():
    arguments = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}
    assert len(arguments) > 10 and arguments <= {*sw.DDP.foreign, *sw.DDP.__struct_fields__}


def _norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def _windows(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        yield [
            {
                "input": torch.randn(8, 4, generator=generator, dtype=torch.float64),
                "labels": torch.randint(3, (8,), generator=generator),
            }
            for _ in range(2)
        ]


def _loss(output, batch):
    return F.cross_entropy(output, batch["labels"], reduction="sum")


def _of_torch(broadcast_buffers):
    """What a script with torch's own DDP saves on rank 0."""
    with sw.init("dp_replicate=2", device="cpu") as world:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # in favour of forward_sync_buffers
            model = DistributedDataParallel(_norms(), broadcast_buffers=broadcast_buffers)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for window in _windows(world.rank):
            for batch in window:  # without no_sync, which accumulates the same gradients
                (_loss(model(batch["input"]), batch) * world.size / 32).backward()
            optim.step()
            optim.zero_grad()
        return {name: value.clone() for name, value in model.module.state_dict().items()}


def _of_ours():
    with sw.init("dp_replicate=2", device="cpu") as world:
        model = sw.parallelize(_norms(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=_loss)
        for window in _windows(world.rank):
            step(window)
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_buffers_are_those_that_a_ddp_run_saves_with_broadcast_buffers_and_without(ranks):
    ours = ranks.run(_of_ours, 2)
    for broadcast_buffers in (True, False):
        saved, other = ranks.run(_of_torch, 2, broadcast_buffers)
        assert not torch.equal(saved["1.running_var"], other["1.running_var"])
        for state in ours:
            for name, value in saved.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
