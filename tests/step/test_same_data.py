"""Ranks that are given the same samples are warned of, and no other use of windows is."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import shardwise as sw
from shardwise.data import same_dataset, stream
from shardwise.data.batch import MicroBatch
from shardwise.model.digest import digest_of_values

SAMPLES = [{"x": torch.full((3,), i / 16)} for i in range(16)]


def seeded():
    torch.manual_seed(0)
    return DataLoader(SAMPLES, 4, shuffle=True)


CASES = {
    "the same samples": lambda world: [[given] for given in seeded()],
    "in two micro-batches": lambda world: [[given, {"x": given["x"] + 1}] for given in seeded()],
    "a sampler": lambda world: [[given] for given in DataLoader(SAMPLES, 2, sampler=DistributedSampler(SAMPLES))],
    "a Loader": lambda world: sw.Loader([SAMPLES[0]] * 32, world, global_batch=4, micro_batch=2),
    "a copy that counts as nothing": lambda world: [
        [MicroBatch({"x": torch.full((2, 3), float(i))}, index=world.rank, padding=world.rank == 1)] for i in range(5)
    ],
    "one batch for ever": lambda world: [[{"x": torch.ones(2, 3)}]] * 9,
    "the same once": lambda world: [[{"x": torch.full((1, 3), float(i or world.rank))}] for i in (1, 2, 0, 3, 4, 5, 6)],
    "a few windows": lambda world: [[given] for given in seeded()][:2],
    "bfloat16, bools, no rows": lambda world: [
        [{"x": torch.full((2, 3), i / 8), "b": torch.ones(2, dtype=torch.bool), "e": torch.ones(0), "h": torch.full((), i).bfloat16(),
          "rank": torch.tensor(world.rank)}]
        for i in range(4)
    ],
}  # fmt: skip


def trained(layout):
    found = {}
    with sw.init(layout, device="cpu") as world:
        for name, windows in CASES.items():
            model = sw.parallelize(nn.Linear(3, 1), world)
            step = sw.TrainStep(
                model,
                torch.optim.SGD(model.parameters(), lr=0.01),
                loss=lambda output, given: output.square().sum(),
                count=lambda given: len(given["x"]),
                forward=lambda model, given: model(given["x"]),
            )
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for window in windows(world):
                    step(window)
            found[name] = sum("given the same samples" in str(each.message) for each in told)
    return found


def test_the_same_samples_on_all_ranks_are_warned_of_once(ranks):
    first, second = ranks.run(trained, 2, "dp_replicate=2")
    assert first == {name: int(name in ("the same samples", "in two micro-batches")) for name in CASES}
    assert set(second.values()) == {0} and set(ranks.run(trained_alone, 1)[0].values()) == {0}


def trained_alone():
    CASES.pop("a sampler")
    return trained("dp_shard=1")


@pytest.mark.parametrize(
    "digest",
    [
        lambda x: digest_of_values({"x": x}, unread=""),
        lambda x: stream._digest({"x": x}, 1),
        lambda x: same_dataset._of_value(x, 1),
    ],
)
def test_a_view_of_one_element_is_read_as_its_copy(digest):
    view = torch.arange(6).reshape(2, 3)[:1, 1]
    assert view.stride() == (3,) and digest(view) == digest(view.clone()) != digest(view + 1)
