"""Loops of a user's own are checked when an optimizer steps, also one that steps on local shards: by ``sw.local_optimizer``, or since a
TrainStep was built on it. While such an optimizer steps it holds the shards, so torch's hook before a step finds no parameter of the model."""

import pytest
import torch
from layouts import every_layout
from step.plain import batch, mine, shard, sum_loss
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError

KINDS = ("plain", "local", "of a TrainStep", "of a TrainStep that has stepped")


def made(layout, kind):
    world, model = shard(layout.text, engine=None if layout.engine == "auto" else layout.engine)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "local":
        sw.local_optimizer(optim)
    if kind.startswith("of a TrainStep"):
        step = sw.TrainStep(model, optim, loss=sum_loss, forward=lambda model, b: model(b["input_ids"]))
        if kind.endswith("has stepped"):
            step(mine([batch(i) for i in range(4)], world))
    return world, model, optim


def inside(layout, kind):
    world, model, optim = made(layout, kind)
    batches = mine([batch(i) for i in range(4)], world)
    with world, pytest.raises(UsageError) as error, sw.window(model, batches) as w:
        for b in w:
            (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
            optim.step()
    return error.value.given


def changed(layout, kind):
    world, model, optim = made(layout, kind)
    with world:
        model.added = nn.Linear(2, 2)
        with pytest.raises(UsageError) as error:
            with sw.accumulate(model, is_last=True):
                sum_loss(model(batch(0)["input_ids"]), batch(0)).backward()
            optim.step()
    return str(error.value)


@pytest.mark.quick("ddp-2-plain", "ddp-2-of a TrainStep", "fsdp-2-local", "fsdp-2-of a TrainStep that has stepped")
@pytest.mark.parametrize("kind", KINDS)
@every_layout("ddp-2", "fsdp-2")
def test_a_step_inside_a_window_is_refused(ranks, layout, kind):
    assert ranks.run(inside, layout.num_ranks, layout, kind) == ["SGD.step() inside a window"] * 2


@pytest.mark.parametrize("kind", KINDS)
@every_layout("ddp-2", "fsdp-2")
def test_a_module_that_was_changed_is_refused_before_the_step(ranks, layout, kind):
    for text in ranks.run(changed, layout.num_ranks, layout, kind):
        assert "added" in text
