"""Loops of a user's own are checked when an optimizer steps, also one that steps on local shards: by ``sw.local_optimizer``, or since a
TrainStep was built on it. While such an optimizer steps it holds the shards, so torch's hook before a step finds no parameter of the model:
a mean loss trained with gradients twice as large, without a warning."""

import warnings

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


def of_a_mean(layout, kind):
    """The warnings of a loop without windows, each with the file that it points at."""
    world, model, optim = made(layout, kind)
    with world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            sum_loss(model(batch(number)["input_ids"]), batch(number)).backward()
            optim.step()
            optim.zero_grad()
    return [(str(one.message), one.filename) for one in caught if issubclass(one.category, UserWarning)]


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
    with world, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.added = nn.Linear(2, 2)
        sum_loss(model(batch(0)["input_ids"]), batch(0)).backward()
        with pytest.raises(UsageError) as error:
            optim.step()
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@every_layout("ddp-2", "fsdp-2", "fsdp2-2x1")
def test_a_mean_loss_outside_of_windows_is_warned_of_once(ranks, layout, kind):
    ((text, file),), *others = ranks.run(of_a_mean, layout.num_ranks, layout, kind)
    assert "summed over 2 ranks, not averaged as DDP does" in text
    assert file == __file__, "it points at the user's line"
    assert not any(others), "rank 0 says it for all"


@pytest.mark.parametrize("kind", KINDS)
@every_layout("ddp-2", "fsdp-2")
def test_a_step_inside_a_window_is_refused(ranks, layout, kind):
    assert ranks.run(inside, layout.num_ranks, layout, kind) == ["SGD.step() inside a window"] * 2


@pytest.mark.parametrize("kind", KINDS)
@every_layout("ddp-2", "fsdp-2")
def test_a_module_that_was_changed_is_refused_before_the_step(ranks, layout, kind):
    for text in ranks.run(changed, layout.num_ranks, layout, kind):
        assert "added" in text
