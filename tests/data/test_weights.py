"""Draws by weight, and what a Loader says of arguments of torch's DataLoader: each thing that it says to write is tried."""

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import shardwise as sw
from shardwise.data.loader_checks import OF_DATA_LOADER
from shardwise.data.order import WeightedOrder


class World:
    """Rank ``rank`` of ``size``, without a process group."""

    device = torch.device("cpu")

    def __init__(self, rank: int = 0, size: int = 1, seed: int = 3):
        self.rank, self.size, self.seed = rank, size, seed

    def axis(self, name: str) -> "World":
        return self


NUM = 40
DATA = TensorDataset(torch.arange(NUM), torch.zeros(NUM, dtype=torch.long))
WEIGHTS = [float(i % 4) for i in range(NUM)]  # a quarter is never drawn


def collate(samples):
    return {"x": torch.stack([sample[0] for sample in samples])}


def loader(rank=0, size=1, **options):
    given = {"global_batch": 8, "micro_batch": 2, "collate": collate, "prepare": None} | options
    return sw.Loader(given.pop("dataset", DATA), World(rank, size), **given)


def windows(size: int, epochs: int = 1, **options) -> list[list[int]]:
    """The samples of each window, in the order of its micro-batches over all ranks."""
    of_ranks = [loader(rank, size, **options) for rank in range(size)]
    found = []
    for _ in range(epochs):
        for parts in zip(*of_ranks, strict=True):
            micros = sorted((b.index, b["x"].tolist()) for part in parts for b in part if not b.padding)
            found.append([x for _, values in micros for x in values])
    return found


class Stream:
    def __iter__(self):
        return iter([(torch.tensor(1), torch.tensor(0))])


# ---- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick("weights1")
@pytest.mark.parametrize("weights", [WEIGHTS, torch.tensor(WEIGHTS), np.array(WEIGHTS, dtype=np.float32)])
def test_draws_are_the_same_under_every_number_of_ranks_and_workers(weights):
    one = windows(1, 2, weights=weights)
    assert one == windows(2, 2, weights=weights) == windows(3, 2, weights=weights)
    assert one == windows(1, 2, weights=weights, num_workers=2)
    assert len(one) == 2 * NUM // 8 and one[: NUM // 8] != one[NUM // 8 :]
    assert all(WEIGHTS[x] for window in one for x in window)


def test_chances_are_those_of_the_weights():
    weights = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    counts = np.zeros(6)
    for epoch in range(20):
        np.add.at(counts, WeightedOrder(weights).draws(np.arange(2000), seed=1, epoch=epoch), 1)
    wanted = weights / weights.sum() * 40000
    assert counts[[0, 3, 5]].sum() == 0
    assert (np.abs(counts - wanted)[[1, 2, 4]] < 5 * np.sqrt(wanted[[1, 2, 4]])).all()  # five standard deviations
    pairs = WeightedOrder(np.ones(8)).draws(np.arange(80000), seed=1, epoch=0).reshape(-1, 2)
    table = np.zeros((8, 8))
    np.add.at(table, (pairs[:, 0], pairs[:, 1]), 1)
    assert np.abs(table - 625).max() < 5 * 25  # neighbours do not depend on each other


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_run_that_resumes_draws_what_it_would_have_drawn(cut):
    first, whole = loader(weights=WEIGHTS), windows(1, 2, weights=WEIGHTS)
    seen = []
    while len(seen) < cut:
        for window in first:
            seen.append([x for b in window for x in b["x"].tolist()])
            if len(seen) == cut:
                break
    state = first.state_dict()
    rest = loader(weights=WEIGHTS)
    rest.load_state_dict(state)
    again = [[x for b in window for x in b["x"].tolist()] for window in rest]
    assert seen + again == whole[: cut + len(again)] and again
    other = loader(1, 2, weights=WEIGHTS)
    other.load_state_dict(state)
    assert [x for b in next(iter(other)) for x in b["x"].tolist()] == whole[cut][2:4] + whole[cut][6:8]


@pytest.mark.parametrize("given", [None, [1.0] * NUM])
def test_a_position_of_other_weights_is_refused(given):
    state = loader(weights=WEIGHTS).state_dict()
    with pytest.raises(sw.ConfigError, match="with weights="):
        loader(weights=given).load_state_dict(state)
    plain = loader().state_dict()
    with pytest.raises(sw.ConfigError, match="with weights=None"):
        loader(weights=WEIGHTS).load_state_dict(plain)


@pytest.mark.parametrize(
    ("weights", "more", "word"),
    [
        ([1.0] * 3, {}, "shape [3], and the dataset has 40"),
        ([0.0] * NUM, {}, "above 0"),
        ([-1.0] + [1.0] * (NUM - 1), {}, "not negative"),
        ([float("nan")] * NUM, {}, "finite"),
        ("balanced", {}, "no list of numbers"),
        (WEIGHTS, {"shuffle": False}, "shuffle=False would have no effect"),
        (WEIGHTS, {"dataset": Stream()}, "own order"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights, more, word):
    with pytest.raises(sw.ConfigError) as caught:
        loader(weights=weights, **more)
    assert word in str(caught.value)


# ---- arguments of DataLoader -------------------------------------------------------------------------------------------


def test_each_argument_of_a_data_loader_is_one_of_a_loader_or_has_an_answer():
    theirs = {*inspect.signature(DataLoader).parameters, *inspect.signature(DistributedSampler).parameters}
    ours = set(inspect.signature(sw.Loader).parameters)
    assert theirs - ours == set(OF_DATA_LOADER)
    for name, fix in OF_DATA_LOADER.items():
        with pytest.raises(sw.ConfigError) as caught:
            sw.Loader(DATA, World(), global_batch=8, micro_batch=2, **{name: None})
        assert caught.value.fix == fix and f"Loader({name}=None)" in caught.value.given


def test_what_the_answers_say_to_write_does_what_it_says():
    full = Subset(DATA, range(NUM // 16 * 16))
    assert {len(window) for window in windows(1, dataset=full, global_batch=16)} == {16}  # drop_last
    assert sorted(x for window in windows(1, dataset=Subset(DATA, [3, 5])) for x in window) == [3, 5]  # sampler
    assert windows(1, shuffle=False)[0] == list(range(8))
    assert windows(2, collate=collate, num_workers=1, prefetch=2) == windows(1)  # collate_fn, prefetch_factor
    ranks = [x for rank in range(2) for b in next(iter(loader(rank, 2))) for x in b["x"].tolist()]
    assert sorted(ranks) == sorted(windows(1)[0])  # num_replicas, rank


class Opening:
    """Opens what it reads in each worker, when the first sample is asked for."""

    def __init__(self) -> None:
        self.file = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int):
        self.file = self.file or [i]
        return torch.tensor(i), torch.rand(1)


def test_what_a_worker_opens_is_opened_in_the_dataset(ranks):
    alone, read = ([b for window in loader(dataset=Opening(), num_workers=n) for b in window] for n in (0, 2))
    assert [b["x"].tolist() for b in alone] == [b["x"].tolist() for b in read]
