"""A step reads the device once, before ``optim.step()``: each read waits for all that the device was given to do."""

from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from step.reads import Device, reads_of
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.verify.sharded import share_of

BLOCKS = sw.Sharding(min_unit_bytes=0)


class Metrics:
    """The loss and two metrics."""

    @staticmethod
    def count(batch: Any) -> Tensor:
        return (batch["labels"] != -100).sum()

    def __call__(self, output: Any, batch: Any) -> dict[str, Tensor]:
        loss = sw.next_token_loss(output, batch)
        return {
            "loss": loss,
            "right": (output.argmax(-1) == batch["labels"]).sum(),
            "most": output.max(-1).values.sum(),
        }


class Buffered(nn.Module):
    """A model with a buffer that each forward writes, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.get("reference").build()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.ones(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        out = self.model(input_ids)
        self.mean.lerp_(out.detach().float().mean().expand(3), 0.1)
        return out * self.table[0].to(out.dtype)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clip": ({}, {"max_grad_norm": 0.1}),
    "largest element": ({}, {"max_grad_norm": 0.1, "norm_type": "inf", "clip_grad_value": 0.01}),
    "metrics": ({}, {"loss": Metrics()}),
    "bf16": ({"precision": "bf16"}, {"max_grad_norm": 0.1}),
    "scaler": ({"precision": "fp16"}, {"max_grad_norm": 0.1}),
    "skip": ({"precision": "bf16"}, {"on_nonfinite": "skip"}),
    "fsdp2": ({"sharding": sw.Sharding(engine="fsdp2", min_unit_bytes=0)}, {"max_grad_norm": 0.1}),
    "recomputed": ({"sharding": BLOCKS, "remat": "full"}, {"max_grad_norm": 0.1}),
}


def reads(layout: str, name: str, micro: int, buffered: bool = False, broken: bool = False) -> list[str]:
    """Reads of the device in the fourth step of a run; the steps before try the loss."""
    torch.manual_seed(0)
    parallel, options = OPTIONS[name]
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        model = sw.parallelize(Buffered() if buffered else models.get("reference").build(), world, **parallel)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        forward = (lambda model, batch: model(batch["input_ids"])) if buffered else models.get("reference").forward
        step = sw.TrainStep(model, optim, forward=forward, **options)
        windows = [share_of(batches, world) for batches in models.get("reference").windows(4, micro * world.size)]
        for window in windows[:3]:
            step(window)
        device = Device()
        runtime = runtime_of(model)
        with runtime.torchs_classes():
            device.put(*runtime.parameters.values(), *model.buffers())
        if step.scaler is not None:
            device.put(step.scaler._scale, step.scaler._growth_tracker)
        if broken:
            with torch.no_grad():
                next(iter(runtime.parameters.values())).fill_(float("nan"))
        with reads_of(device) as found:
            out = step(windows[3])
        assert out.skipped == broken
        with runtime.torchs_classes():
            assert device.has(runtime.parameters)
        return list(found)


@pytest.mark.quick("clip", "metrics", "skip", "fsdp2", "recomputed")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_of_one_rank_reads_the_device_once(ranks, name):
    assert ranks.run(reads, 1, "dp_shard=1", name, 2)[0] == ["together"]


@pytest.mark.quick("dp_shard=2-skip", "dp_replicate=2-metrics")
@pytest.mark.parametrize("name", ["clip", "metrics", "scaler", "skip"])
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_step_of_two_ranks_reads_the_device_once(ranks, layout, name):
    assert ranks.run(reads, 2, layout, name, 4) == [["together"]] * 2


def reads_beside_nccl_alone(layout: str, name: str) -> tuple[list[str], bool]:
    """As in a program that has called ``init_process_group("nccl")``: its group has no backend for the CPU."""
    with mock.patch.object(dist, "get_backend_config", lambda *_: "cuda:nccl"):
        with sw.init(layout, device="cpu", timeout_s=60) as world:
            is_own = world.agreement.host_group is not dist.group.WORLD
            assert world.agreement.device.type == "cpu" and world.gather(world.rank) == [0, 1]
        return reads(layout, name, 4), is_own


@pytest.mark.quick("dp_shard=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_beside_a_group_of_nccl_alone_numbers_of_the_host_have_one_of_their_own(ranks, layout):
    """Through the GPU, each would be a read of its own: three in a step."""
    assert ranks.run(reads_beside_nccl_alone, 2, layout, "clip") == [(["together"], True)] * 2


def test_accumulation_and_buffers_cost_no_further_read(ranks):
    assert ranks.run(reads, 1, "dp_shard=1", "clip", 4, True)[0] == ["together"]


def test_a_step_that_is_skipped_reads_the_device_once(ranks):
    assert ranks.run(reads, 1, "dp_shard=1", "skip", 2, False, True)[0] == ["together"]
