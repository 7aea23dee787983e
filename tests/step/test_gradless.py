"""A loss or a model without a gradient: which of its causes it is, told on every rank before anything waits for it."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from models.tied import Tied
from step.plain import batch, mine, shard, sum_loss, values
from torch import nn

import shardwise as sw

LAYOUTS = ["dp_replicate=2", "dp_shard=2"]


def detached(output, b):
    return sum_loss(output, b).detach()


detached.count = lambda b: (b["labels"] != -100).sum()


class Detaching(nn.Module):
    """Its forward returns nothing that a backward could start from."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 11)

    def forward(self, input_ids):
        return self.embed(input_ids).detach()


def frozen():
    return nn.Embedding(11, 11).requires_grad_(False)


CAUSES = {
    "loss": "a loss that is detached from the model",
    "output": "a loss that is detached from the model",
    "frozen": "a model without a trainable parameter",
    "no_grad": "a training step with gradients switched off",
    "inference": "a training step inside torch.inference_mode()",
}


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def step_without(cause, layout, only=None):
    """The error on this rank of a step whose loss has no gradient on rank ``only`` (None: on all)."""
    build = {"output": Detaching, "frozen": frozen}.get(cause)
    world, model = shard(layout, **({"build": build} if build else {}))
    with world:
        here = only in (None, world.rank)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.TrainStep(model, optim, loss=detached if cause == "loss" and here else sum_loss)
        before = values(model)
        with MODES[cause]() if here and cause in MODES else nullcontext(), pytest.raises(sw.ShardwiseError) as caught:
            step(mine([batch(0), batch(1)], world))
        same = all(torch.equal(tensor, before[name]) for name, tensor in values(model).items())
        return type(caught.value).__name__, str(caught.value), same and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("layout", ["dp_shard=1", *LAYOUTS])
def test_what_has_no_gradient_is_told_by_its_cause(ranks, layout, cause):
    for kind, text, same in ranks.run(step_without, 1 if layout == "dp_shard=1" else 2, cause, layout):
        assert kind == "UsageError" and text.startswith(CAUSES[cause]) and same


@pytest.mark.parametrize("cause", ["loss", "no_grad", "inference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_without_a_gradient_ends_the_step_on_all(ranks, layout, cause):
    (_, other, clean), (kind, own, same) = ranks.run(step_without, 2, cause, layout, 1)
    assert kind == "UsageError" and own.startswith(CAUSES[cause]) and same and clean
    assert CAUSES[cause] in other and other.startswith("rank 1 could not")


@dataclass
class Output:
    logits: torch.Tensor


class Recording(Tied):
    def forward(self, input_ids):
        return Output(super().forward(input_ids))


def step_with_a_record(layout, loss):
    """The error on this rank of a step whose model returns a dataclass; rank 1 has nothing to differentiate, or a mean."""
    world, model = shard(layout, build=Recording)
    with world, pytest.raises(sw.ShardwiseError) as caught:

        def run(output, b):
            value = F.cross_entropy(output.logits.flatten(0, -2), b["labels"].flatten(), reduction=loss)
            return value if loss == "mean" or world.rank == 0 else value.detach()

        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        sw.TrainStep(model, optim, loss=run)(mine([batch(0), batch(1)], world))
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_output_that_is_a_dataclass_is_looked_into(ranks, layout):
    """Its tensors were not found: ranks waited for one that had nothing to run backward from, and a mean was let pass."""
    other, own = ranks.run(step_with_a_record, 2, layout, "sum")
    assert own.startswith(CAUSES["loss"]) and other.startswith("rank 1 could not run backward")
    assert all("a loss that takes a mean" in text for text in ranks.run(step_with_a_record, 2, layout, "mean"))


def own_loop(cause):
    world, model = shard("dp_shard=2")
    mode = MODES.get(cause, nullcontext)
    batches = mine([batch(0), batch(1)], world)
    with world, mode(), pytest.raises(sw.UsageError) as caught, sw.window(model, batches) as w:
        for b in w:
            (detached(model(b["input_ids"]), b) / w.num_tokens).backward()
    return str(caught.value)


@pytest.mark.parametrize("cause", ["loss", "no_grad"])
def test_an_own_loop_without_a_gradient_is_told_too(ranks, cause):
    for text in ranks.run(own_loop, 2, cause):
        assert CAUSES[cause] in text
