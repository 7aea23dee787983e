"""What people type at first, and what would train silently wrong: each is named, with the call to make instead."""

import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.state import save_weights


def build():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch():
    return {"x": torch.ones(2, 4), "labels": torch.tensor([0, 1])}


def sum_loss(output, b):
    return F.cross_entropy(output, b["labels"], reduction="sum")


def with_number(output, b):
    return {"loss": sum_loss(output, b), "right": float((output.argmax(-1) == b["labels"]).sum())}


class ResumePoint(nn.Module):
    """A language model that returns more than logits."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(5, 5)

    def forward(self, input_ids, labels=None):
        logits = self.embed(input_ids)
        if self.kind == "tuple":
            return None, logits
        if self.kind == "dict":
            return {"scores": logits}
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return types.SimpleNamespace(logits=logits, loss=loss)


def step_on_tokens(world, kind, **options):
    model = sw.parallelize(lambda: ResumePoint(kind), world)
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    step([{"input_ids": torch.tensor([[0, 1, 2]]), "labels": torch.tensor([[1, 2, 3]])}])


def step_without_labels(model, key, value):
    sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda o, b: o.sum())([{key: value}])


def errors():
    """name -> text of the error each misuse gives, on a world of one."""
    found = {}
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(build, world)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.TrainStep(model, optim, loss=sum_loss)
        tries = {
            "mapping": lambda: step(batch()),
            "tensor": lambda: step(torch.ones(2, 4)),
            "tuple": lambda: step([(torch.ones(2, 4), torch.tensor([0, 1]))]),
            "torch loss": lambda: sw.TrainStep(model, optim, loss=nn.CrossEntropyLoss(reduction="sum")),
            "torch function": lambda: sw.TrainStep(model, optim, loss=F.cross_entropy),
            "torch loss of an evaluation": lambda: sw.evaluate(model, [batch()], loss=nn.CrossEntropyLoss()),
            "optimizer class": lambda: sw.TrainStep(model, torch.optim.SGD),
            "no optimizer": lambda: sw.TrainStep(model, None),
            "layout for world": lambda: sw.parallelize(build, "dp_shard=1"),
            "scheduler class": lambda: sw.TrainStep(
                model, optim, loss=sum_loss, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR
            ),
            "scheduler of another kind": lambda: sw.TrainStep(model, optim, loss=sum_loss, scheduler=lambda step: 0.1),
            "loss class": lambda: sw.TrainStep(model, optim, loss=nn.CrossEntropyLoss),
            "loss name": lambda: sw.TrainStep(model, optim, loss="cross_entropy"),
            "count": lambda: sw.TrainStep(model, optim, loss=sum_loss, count=8),
            "count of a window": lambda: sw.window(model, [batch()], count=8),
            "count of an evaluation": lambda: sw.evaluate(model, [batch()], loss=sum_loss, count=8),
            "forward": lambda: sw.TrainStep(model, optim, loss=sum_loss, forward="logits"),
            "forward of an evaluation": lambda: sw.evaluate(model, [batch()], loss=sum_loss, forward="logits"),
            "metric by item": lambda: sw.TrainStep(model, optim, loss=with_number)([batch()]),
            "loss by item": lambda: sw.TrainStep(model, optim, loss=lambda o, b: sum_loss(o, b).item())([batch()]),
            "string field": lambda: next(iter(sw.Loader([{"text": "a word"}], world, global_batch=1, micro_batch=1))),
            "None field": lambda: next(iter(sw.Loader([{"mask": None}], world, global_batch=1, micro_batch=1))),
            "DataLoader": lambda: sw.Loader(DataLoader([batch()], batch_size=1), world, global_batch=1, micro_batch=1),
            "float labels": lambda: sw.TrainStep(model, optim)([{"x": torch.ones(2, 4), "labels": torch.ones(2, 3)}]),
            "tuple output": lambda: step_on_tokens(world, "tuple"),
            "dict output": lambda: step_on_tokens(world, "dict"),
            "loss of a model without labels": lambda: step_on_tokens(world, "object", loss=lambda o, b: o.loss),
            "no count of tokens": lambda: step_without_labels(model, "input_ids", torch.ones(2, 4)),
            "no count of samples": lambda: step_without_labels(model, "pixels", torch.ones(2, 4)),
        }
        for name, call in tries.items():
            try:
                call()
            except sw.ShardwiseError as error:
                found[name] = str(error)
            except Exception as error:
                found[name] = f"not ours: {error!r}"
    return found


WORDS = {
    "mapping": "step([batch])",
    "tensor": "step([batch])",
    "tuple": "make it a dict",
    "torch loss": "wrap it: loss=lambda output, batch",
    "torch function": "wrap it: loss=lambda output, batch",
    "torch loss of an evaluation": "wrap it: loss=lambda output, batch",
    "optimizer class": "torch.optim.AdamW(model.parameters()",
    "no optimizer": "torch.optim.AdamW(model.parameters()",
    "layout for world": "world = sw.init('dp_shard=1')",
    "scheduler class": "TrainStep(scheduler=CosineAnnealingLR)",
    "scheduler of another kind": "it is not an object with step()",
    "loss class": "loss=CrossEntropyLoss, a class",
    "loss name": "loss='cross_entropy'",
    "count": "pass count=lambda batch: ...",
    "count of a window": "pass count=lambda batch: ...",
    "count of an evaluation": "pass count=lambda batch: ...",
    "forward": "pass forward=lambda model, batch: ...",
    "forward of an evaluation": "pass forward=lambda model, batch: ...",
    "metric by item": "return a tensor: drop float() / .item()",
    "loss by item": "return a tensor: drop float() / .item()",
    "string field": "'text' of a sample is 'a word'",
    "None field": "'mask' of a sample is None",
    "DataLoader": "pass loader.dataset; Loader makes the batches itself",
    "tuple output": "loss=lambda output, batch: sw.next_token_loss(output[1], batch)",
    "dict output": "next_token_loss of a dict with the keys ['scores']",
    "loss of a model without labels": "pass loss=sw.model_loss, which gives it labels",
    "no count of tokens": 'count=lambda batch: batch["input_ids"].numel()',
    "no count of samples": 'count=lambda batch: batch["pixels"].shape[0]',
    "float labels": "a cross entropy: a label is the number of a class",
}


def test_first_mistakes_are_told_with_the_call_to_make(ranks):
    found = ranks.run(errors, 1)[0]
    assert {name: text for name, text in WORDS.items() if text not in found.get(name, "")} == {}


def different(what):
    with sw.init("dp_replicate=2", device="cpu") as world:
        model = sw.parallelize(build, world)
        lr = 0.1 * (1 + world.rank) if what == "lr" else 0.1
        cls = torch.optim.AdamW if what == "optimizer" and world.rank else torch.optim.SGD
        clip = 1.0 + world.rank if what == "max_grad_norm" else None
        try:
            sw.TrainStep(model, cls(model.parameters(), lr=lr), loss=sum_loss, max_grad_norm=clip)
        except sw.RankError as error:
            return str(error), error.ranks
    return None


@pytest.mark.parametrize("what", ["lr", "optimizer", "max_grad_norm"])
def test_ranks_that_would_step_differently_are_named(ranks, what):
    for outcome in ranks.run(different, 2, what):
        text, who = outcome
        assert what in text and "rank 0" in text and "rank 1" in text and who == (1,)


def alone(call, folder):
    """Rank 0 makes a call that all ranks must make; rank 1 closes its world."""
    world = sw.init("dp_shard=2", device="cpu", timeout_s=60)
    try:
        model = sw.parallelize(build, world)
        if world.is_main:
            {
                "full_state_dict": lambda: sw.full_state_dict(model),
                "save_weights": lambda: save_weights(model, folder),
                "evaluate": lambda: sw.evaluate(model, [batch()], loss=sum_loss),
            }[call]()
    finally:
        world.close() if world.rank else None


@pytest.mark.quick("evaluate-evaluation, a batch", "save_weights-save_weights, before it begins")
@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("full_state_dict", "full_state_dict, before it is gathered"),
        ("save_weights", "save_weights, before it begins"),
        ("evaluate", "evaluation, a batch"),
    ],
)
def test_a_call_of_rank_0_alone_names_the_ranks_that_left(ranks, tmp_path, call, place):
    """`if world.is_main: save(...)`: it waited for them until the group's timeout, and they for it."""
    with pytest.raises(sw.RankError) as caught:
        ranks.run(alone, 2, call, str(tmp_path), timeout_s=25)
    assert f"rank 1 left while rank 0 waited at {place}" in str(caught.value)


def both_ends():
    try:
        with sw.init("dp_shard=2", device="cpu", timeout_s=60) as world:
            model = sw.parallelize(build, world)
            if world.is_main:
                sw.full_state_dict(model)
    except sw.RankError as error:
        return str(error)


def test_the_rank_that_did_not_come_is_not_told_that_it_is_lost(ranks):
    first, second = ranks.run(both_ends, 2, timeout_s=25)
    assert "rank 1 left while rank 0 waited" in first and "none of them for rank 0 alone" in first
    assert "rank 1 was reported lost by the others while it was at the end" in second
    assert "rank 0 failed at the begin of full_state_dict" in second


def other_call():
    with sw.init("dp_shard=2", device="cpu", timeout_s=60) as world:
        model = sw.parallelize(build, world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
        with pytest.raises(sw.RankError) as caught:
            sw.full_state_dict(model) if world.is_main else step([batch()])
        return str(caught.value)


def test_a_call_of_rank_0_alone_while_others_train_on_is_named(ranks):
    for text in ranks.run(other_call, 2):
        assert "full_state_dict" in text and "window 1, before forward" in text


def _left_out(given):
    with sw.init("dp_shard=2", device="cpu") as world, warnings.catch_warnings(record=True) as caught:
        model = sw.parallelize(build(), world)
        warnings.simplefilter("always")
        params = list(model.parameters())
        sw.TrainStep(model, torch.optim.SGD(params[:given] if given else params, lr=0.1), loss=sum_loss)
        return [str(warning.message) for warning in caught]


def test_an_optimizer_of_some_parameters_is_told_which_are_never_changed(ranks):
    (said,), others = ranks.run(_left_out, 2, 1)
    assert "SGD holds 1 of the model's" in said and "without 0.bias, 2.weight, 2.bias: they are never changed" in said
    assert others == [] and ranks.run(_left_out, 2, None) == [[], []]
