"""Samples that are seen twice, by every rank, in one order for ever, or not at all."""

import torch
import torch.distributed as dist
from mistakes.rows import Mistake, Plain
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, random_split

import shardwise as sw

INFINITY = float("inf")
SAMPLES = [{"x": torch.full((3,), i / 16, dtype=torch.float64), "number": torch.tensor(i)} for i in range(16)]


def squares(output, given):
    return (output.squeeze(-1) - given["x"].sum(-1) - 1).square().sum()


def step_of(world):
    torch.manual_seed(0)
    model = sw.parallelize(nn.Linear(3, 1).double(), world)
    return sw.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        loss=squares,
        count=lambda given: len(given["x"]),
        forward=lambda model, given: model(given["x"]),
    )


def numbers(world, window):
    """The samples of a window, over all ranks, in order."""
    return sorted(n for part in world.gather([b["number"].tolist() for b in window]) for each in part for n in each)


def everywhere(values):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


class SameSamplesOnAllRanks(Mistake):
    """A `DataLoader` without a `DistributedSampler`, seeded alike: every rank trains on the same samples."""

    ranks = 2
    says = "ranks were given the same samples"

    def plain(self):
        torch.manual_seed(0)
        loader = DataLoader(list(range(16)), 4, shuffle=True)
        seen = everywhere([n for _, given in zip(range(2), loader, strict=False) for n in given.tolist()])
        num = len({n for part in seen for n in part})
        return Plain(f"two ranks see {num} different samples in 2 batches of 4 each, not 16", (16 - num) / 16)

    def ours(self):
        torch.manual_seed(0)
        loader = DataLoader(SAMPLES, 4, shuffle=True)
        with sw.init("dp_shard=2", device="cpu") as world:
            step = step_of(world)
            for given in loader:
                step([given])
        return INFINITY


class ShuffledOnEachRank(Mistake):
    """Each rank shuffles or splits the dataset by random numbers of its own, and then takes its part."""

    ranks = 2
    says = "the ranks have other samples in their datasets"

    def plain(self):
        torch.manual_seed(dist.get_rank())
        train, _ = random_split(list(range(16)), [12, 4])
        seen = everywhere([train[i] for i in DistributedSampler(train, shuffle=False)])
        num = len({n for part in seen for n in part})
        return Plain(f"an epoch of 12 samples has {num} different ones", (12 - num) / 12)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            torch.manual_seed(world.rank)
            train, _ = random_split(SAMPLES, [12, 4])
            step = step_of(world)
            for window in sw.Loader(train, world, global_batch=4, micro_batch=2):
                step(window)
        return INFINITY


class EpochNotSet(Mistake):
    """`DistributedSampler.set_epoch` is forgotten: every epoch has the same order, and the same batches; `sw.Loader` has no such call."""

    ranks = 2
    versus_one = True

    def plain(self):
        sampler = DistributedSampler(list(range(16)))
        orders = [list(sampler) for _ in range(3)]
        same = sum(each == orders[0] for each in orders)
        return Plain(f"{same} of 3 epochs have the same order", same / 3)

    def ours(self):
        with sw.init("dp_shard=-1", device="cpu") as world:
            loader = sw.Loader(SAMPLES, world, global_batch=4, micro_batch=2)
            epochs = [[numbers(world, window) for window in loader] for _ in range(3)]
        flat = [[float(n) for window in each for n in window] for each in epochs]
        assert len(set(map(tuple, flat))) == 3 and all(sorted(each) == list(range(16)) for each in flat)
        return flat


class DataBegunAnew(Mistake):
    """A resumed run restores weights and optimizer, and begins the epoch's data anew."""

    ranks = 2

    def plain(self):
        seen, order = [], torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
        for killed_after in (2, 4):
            for i, given in enumerate(DataLoader(order, 4)):
                if i == killed_after:
                    break
                seen += given.tolist()
        twice = sum(seen.count(n) == 2 for n in range(16))
        return Plain(f"{twice} of 16 samples of the epoch are trained on twice", twice / 16)

    def ours(self):
        seen = []
        with sw.init("dp_shard=2", device="cpu") as world:
            for stops_after in (2, 4):
                step = step_of(world)
                loader = sw.Loader(SAMPLES, world, global_batch=4, micro_batch=2)
                with sw.CheckpointManager("run", step, async_save=False) as ckpt:
                    for window in ckpt.resume(loader):
                        step(window)
                        seen += numbers(world, window)
                        if step.num_steps == stops_after:
                            ckpt.save()
                            break
        return 0.0 if sorted(seen) == list(range(16)) else INFINITY


class PlaceOfAnotherNumberOfRanks(Mistake):
    """The place in the data is kept in batches of a rank, and the run goes on with another number of ranks."""

    ranks = 2

    def plain(self):
        order, done = list(range(16)), 3  # three batches of two samples on each of two ranks
        seen = [n for rank in range(2) for n in order[rank::2][: 2 * done]]
        rest = order[2 * done :]  # one rank skips three batches
        twice = sum(n in seen for n in rest)
        return Plain(f"{twice} of 16 samples are trained on twice", twice / 16)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            loader, seen = sw.Loader(SAMPLES, world, global_batch=4, micro_batch=1), []
            for _, window in zip(range(2), loader, strict=False):
                seen += numbers(world, window)
            one = sw.Loader(SAMPLES, Alone(world), global_batch=4, micro_batch=1)
            one.load_state_dict({**loader.state_dict()})
            seen += [int(given["number"]) for window in one for given in window]
        return 0.0 if sorted(seen) == list(range(16)) else INFINITY


class Alone:
    """The world of one rank, as a Loader sees it."""

    def __init__(self, world):
        self.seed, self.device = world.seed, world.device

    def axis(self, name):
        class Axis:
            rank, size = 0, 1

        return Axis


class WindowLeftOutOnOneRank(Mistake):
    """One rank catches an exception of its data and goes on with the next batch: from then on samples are combined otherwise."""

    ranks = 2
    says = "different windows of a Loader"

    def plain(self):
        sampler = DistributedSampler(list(range(16)), shuffle=False)
        batches = list(DataLoader(list(range(16)), 2, sampler=sampler))
        if dist.get_rank():
            batches = batches[1:]  # the first could not be read
        steps = everywhere([given.tolist() for given in batches])
        meant = everywhere([given.tolist() for given in DataLoader(list(range(16)), 2, sampler=sampler)])
        wrong = sum([a, b] != [c, d] for a, b, c, d in zip(*steps, *meant, strict=False))
        return Plain(f"{wrong} of {len(steps[1])} steps are of other samples than meant", wrong / len(steps[1]))

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            step = step_of(world)
            windows = iter(sw.Loader(SAMPLES, world, global_batch=4, micro_batch=2))
            if world.rank:
                next(windows)
            step(next(windows))
        return INFINITY
