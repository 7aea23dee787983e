"""Ranks whose Loaders are given other datasets are refused; what only looks like it is not."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import shardwise as sw
from shardwise.data.same_dataset import digest_of_dataset

SAMPLES = [{"x": torch.full((3,), i / 16)} for i in range(16)]


class Augmented(Dataset):
    """Draws numbers as it is read: no sample is the same twice."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"x": torch.full((3,), i / 16) + torch.rand(3)}


class Named(Dataset):
    """Of files, whose samples nobody reads to compare them."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return {"x": torch.full((3,), float(self.names[i]))}


def shuffled(seed):
    return random.Random(seed).sample(SAMPLES, 16)


def rows(order):
    return TensorDataset(torch.arange(48.0).reshape(16, 3)[order])


def one_seed():
    return torch.Generator().manual_seed(0)


OTHERS = {  # as scripts give them, behind sw.init
    "shuffled by a seed of its own": lambda rank: shuffled(rank),
    "a part per rank": lambda rank: SAMPLES[rank::2],
    "a tuple": lambda rank: tuple(shuffled(rank)),
    "tensors": lambda rank: rows(torch.randperm(16, generator=torch.Generator().manual_seed(rank))),
    "a random split": lambda rank: random_split(SAMPLES, [12, 4])[0],
    "a random split of files": lambda rank: random_split(Named(list(range(16))), [12, 4])[0],
    "a split of a shuffled list": lambda rank: Subset(shuffled(rank), range(8)),
    "two neighbours exchanged": lambda rank: [*SAMPLES[: 4 + rank], *reversed(SAMPLES[4 + rank : 8]), *SAMPLES[8:]],
    "one sample in the middle": lambda rank: [*SAMPLES[:8], {"x": torch.full((3,), 9.0 + rank)}, *SAMPLES[9:]],
    "of other lengths": lambda rank: SAMPLES[: 16 - rank],
    "of one window less": lambda rank: SAMPLES[: 16 - 4 * rank],
    "a class, shuffled by each rank": lambda rank: Named(random.Random(rank).sample(range(16), 16)),
    "a class, a part per rank": lambda rank: Named(list(range(16))[rank::2]),
}
ALIKE = {
    "one list": lambda rank: SAMPLES,
    "shuffled by one seed": lambda rank: shuffled(0),
    "a split by one seed": lambda rank: random_split(SAMPLES, [12, 4], one_seed())[0],
    "augmented": lambda rank: Augmented(),
    "a class": lambda rank: Named(list(range(16))),
    "a split of augmented": lambda rank: Subset(Augmented(), range(8)),
    "tensors": lambda rank: rows(torch.arange(16)),
    "with objects": lambda rank: [{**each, "x": each["x"], "what": object()} for each in SAMPLES],
}


def evaluated(model, loader):
    sw.evaluate(model, loader, loss=lambda output, _: output.sum(), count=lambda given: len(given["x"]))


def trained(model, windows):
    for window in windows:
        with sw.window(model, window, count=lambda given: len(given["x"])) as w:
            for given in w:
                (model(given["x"]).sum() / w.num_tokens).backward()


def stepped(model, windows):
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    step = sw.TrainStep(model, optim, loss=lambda output, _: output.sum(), count=lambda given: len(given["x"]))
    for window in windows:
        step(window)


def list_trained(model, loader):
    """The windows are read before, and the Loader is gone."""
    windows = list(loader)
    del loader
    trained(model, windows)


def mapped(model, loader):
    evaluated(model, (window for window in list(loader)))


READERS = [trained, stepped, list_trained, evaluated, mapped]


def refused(read=trained):
    told = {}
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(nn.Linear(3, 1), world)
        for name, make in (*OTHERS.items(), *(("alike: " + name, make) for name, make in ALIKE.items())):
            dataset = make(world.rank)
            loader = sw.Loader(dataset, world, global_batch=4, micro_batch=2, prepare=None, collate=collated)
            given = [loader]  # so that nothing else holds it
            del loader
            try:
                read(model, given.pop())
                told[name] = None
            except sw.RankError as error:
                told[name] = str(error)
            model.zero_grad()
    return told


def collated(samples):
    xs = [each["x"] if isinstance(each, dict) else each[0] for each in samples]
    return {"x": torch.stack(xs)}


@pytest.mark.parametrize("read", READERS)
def test_a_loader_whose_ranks_have_other_samples_is_refused(ranks, read):
    first, second = ranks.run(refused, 2, read)
    assert first == second
    for name in OTHERS:
        assert first[name] is not None and "the ranks have other samples in their datasets" in first[name], name
        assert "use one seed on all ranks" in " ".join(first[name].split()), first[name]
    assert {name: first["alike: " + name] for name in ALIKE} == dict.fromkeys(ALIKE)


@pytest.mark.parametrize(
    "dataset",
    [[], np.zeros((0, 3)), np.arange(6.0), [np.float32(1), "a", None, b"c", 1 + 2j], [(1, [2, {"a": torch.ones(0)}])], torch.ones(3, 2)],
    ids=["empty", "no rows", "array", "plain", "nested", "tensor"],
)  # fmt: skip
def test_digests_are_of_what_is_in_a_dataset(dataset):
    assert digest_of_dataset(dataset) == digest_of_dataset(dataset) != 0
    assert digest_of_dataset([dataset]) != digest_of_dataset([dataset, dataset])


class Cached(Augmented):
    """Keeps something for each sample that no two processes have alike."""

    def __init__(self):
        self.cache = [object() for _ in range(16)]


@pytest.mark.parametrize(
    "make",
    [lambda: [object() for _ in range(16)], Augmented, Cached, lambda: [np.array([object()])], lambda: [torch.rand(2).to_sparse()]],
    ids=["objects", "augmented", "cached", "arrays of objects", "sparse"],
)  # fmt: skip
def test_of_what_has_no_bytes_of_its_own_only_the_length_is_compared(make):
    assert digest_of_dataset(make()) == digest_of_dataset(make()) != digest_of_dataset(SAMPLES)


def test_files_are_compared_by_name_since_folders_differ_between_nodes():
    one, other = (Named([f"/node{node}/{i}.png" for i in range(4)]) for node in (1, 2))
    assert digest_of_dataset(one) == digest_of_dataset(other) != digest_of_dataset(Named(one.names[::-1]))
