"""A step and a loader that cannot take over what a checkpoint has of theirs are told before anything of the run changes."""

import json
import random

import pytest
import torch
from models.drops import Drops
from state.runs import EVERY, Texts, equal, state
from torch.optim import lr_scheduler

import shardwise as sw

KINDS = {
    "none": lambda optim: None,
    "cosine": lambda optim: lr_scheduler.CosineAnnealingLR(optim, 9),
    "exponential": lambda optim: lr_scheduler.ExponentialLR(optim, 0.9),
    "lambda": lambda optim: lr_scheduler.LambdaLR(optim, lambda done: 1 / (1 + done)),
    "cycle": lambda optim: lr_scheduler.OneCycleLR(optim, 0.05, total_steps=40),
    "warm": lambda optim: lr_scheduler.SequentialLR(
        optim, [lr_scheduler.LinearLR(optim, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optim, 9)], [2]
    ),
    "other warm": lambda optim: lr_scheduler.SequentialLR(
        optim, [lr_scheduler.LinearLR(optim, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optim, 0.9)], [2]
    ),
    "chain": lambda optim: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optim, 0.9)], optimizer=optim),
}


def built(world, kind, *, turned=False):
    """Groups with rates of their own; ``turned``: in the other order."""
    torch.manual_seed(0)
    model = sw.parallelize(Drops().double(), world, sharding=EVERY)
    biases = {"params": [p for name, p in model.named_parameters() if name.endswith("bias")], "lr": 0.001}
    others = {"params": [p for name, p in model.named_parameters() if not name.endswith("bias")]}
    optim = torch.optim.AdamW([biases, others] if turned else [others, biases], lr=0.02)
    return model, sw.TrainStep(model, optim, scheduler=KINDS[kind](optim))


def resumed(root, before, now):
    """Saves by one schedule and resumes by another; whether the run is as it was, and what was said."""
    with sw.init("dp_shard=2", device="cpu") as world:
        _, step = built(world, before)
        loader = sw.Loader(Texts(), world, global_batch=4, micro_batch=1)
        with sw.CheckpointManager(root, step, async_save=False) as manager:
            step(next(iter(manager.resume(loader))))
            manager.save()
        model, step = built(world, now[0], turned=now[1])
        loader = sw.Loader(Texts(now[2]), world, global_batch=4, micro_batch=1)

        def everything():
            return *state(model, step.optim), step.state_dict(), loader.state_dict(), random.getstate(), world.seed

        old, told = everything(), None
        with sw.CheckpointManager(root, step, async_save=False) as manager:
            try:
                manager.resume(loader)
            except sw.errors.ShardwiseError as error:
                told = type(error).__name__, error.given, error.why, error.fix
        return equal(old, everything()), told


@pytest.mark.quick("warm-cosine-SequentialLR[LinearLR, CosineAnnealingLR]", "none-cosine-None")
@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("cosine", "exponential", "CosineAnnealingLR"),
        ("exponential", "cosine", "ExponentialLR"),
        ("cycle", "lambda", "OneCycleLR"),
        ("warm", "cosine", "SequentialLR[LinearLR, CosineAnnealingLR]"),
        ("warm", "other warm", "SequentialLR[LinearLR, CosineAnnealingLR]"),
        ("chain", "exponential", "ChainedScheduler[ExponentialLR]"),
        ("none", "cosine", None),
        ("cosine", "none", None),
    ],
)
def test_a_scheduler_of_another_class_is_refused_before_anything_changes(ranks, tmp_path, before, now, told):
    for unchanged, error in ranks.run(resumed, 2, tmp_path, before, (now, False, 40)):
        assert unchanged and error is not None and error[0] == "CheckpointError"
        assert told is None or error[1] == f"the state of a {told}"


@pytest.mark.quick("cosine")
@pytest.mark.parametrize("kind", ["cosine", "lambda", "warm"])
def test_groups_in_another_order_under_a_scheduler_are_refused_before_anything_changes(ranks, tmp_path, kind):
    for unchanged, error in ranks.run(resumed, 2, tmp_path, kind, (kind, True, 40)):
        assert unchanged and error is not None and "in another order" in error[1]
        assert "begin with blocks.0.lin.bias, embed.weight, and began with embed.weight, blocks.0.lin.bias" in error[2]


def test_groups_in_another_order_without_a_scheduler_keep_their_rates(ranks, tmp_path):
    assert [error for _, error in ranks.run(resumed, 2, tmp_path, "none", ("none", True, 40))] == [None, None]


def test_a_dataset_of_another_length_is_refused_before_anything_changes(ranks, tmp_path):
    for unchanged, error in ranks.run(resumed, 2, tmp_path, "cosine", ("cosine", False, 41)):
        assert unchanged and error is not None and error[0] == "ConfigError" and "num_samples=40" in error[1]


def taken_without_names():
    with sw.init("dp_shard=1", device="cpu") as world:
        _, step = built(world, "warm")
        now = step.state_dict()
        assert json.loads(json.dumps(now["scheduler_class"])) == "SequentialLR[LinearLR, CosineAnnealingLR]"
        step.load_state_dict({name: value for name, value in now.items() if not name.startswith("scheduler_")})
        return True


def test_a_state_without_the_names_of_classes_is_taken(ranks):
    assert ranks.run(taken_without_names, 1) == [True]
