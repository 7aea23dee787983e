"""Every source of random numbers that a forward may draw from belongs to the micro-batch, not to the rank."""

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from models.tied import Tied
from step.plain import batch, mine, sum_loss

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.world import forked_streams

SOURCES = ["python", "numpy", "torch.Generator", "numpy.Generator", "RandomState", "random.Random"]


class Drawing(Tied):
    """Scales by a number from ``source``, with a generator of its own where that is one."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.blocks[1].own = {
            "torch.Generator": lambda: torch.Generator().manual_seed(1),
            "numpy.Generator": lambda: np.random.default_rng(1),
            "RandomState": lambda: np.random.RandomState(1),
            "random.Random": lambda: random.Random(1),
        }.get(source, lambda: None)()

    def draw(self):
        own = self.blocks[1].own
        if self.source == "torch.Generator":
            return float(torch.rand((), generator=own))
        if self.source == "RandomState":
            return own.rand()
        return {"python": random.random, "numpy": np.random.rand}.get(self.source, getattr(own, "random", None))()

    def forward(self, input_ids):
        return super().forward(input_ids) * (1 + self.draw())


def train(layout, source):
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(3)
        model = sw.parallelize(Drawing(source).double(), world, sharding=sw.Sharding(min_unit_bytes=0))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
        return [step(mine([batch(10 * w + i) for i in range(4)], world)).loss for w in range(3)]


@pytest.mark.quick("python", "numpy", "torch.Generator", "numpy.Generator")
@pytest.mark.parametrize("source", SOURCES)
def test_numbers_drawn_in_forward_do_not_depend_on_the_layout(ranks, source):
    one = ranks.run(train, 1, "dp_shard=1", source)[0]
    assert one == ranks.run(train, 1, "dp_shard=1", source)[0]
    for losses in ranks.run(train, 2, "dp_shard=2", source):
        assert losses == pytest.approx(one, rel=1e-12)


def evaluated(layout, source):
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(3)
        model = sw.parallelize(Drawing(source).double(), world, sharding=sw.Sharding(min_unit_bytes=0))
        before = torch.get_rng_state(), random.getstate()
        losses = [
            sw.evaluate(model, mine([batch(i) for i in range(4)], world), loss=sum_loss)["loss"] for _ in range(2)
        ]
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
        return losses


@pytest.mark.parametrize("source", ["python", "torch.Generator"])
def test_an_evaluation_draws_the_same_each_time_and_under_every_layout_and_leaves_no_trace(ranks, source):
    one, again = ranks.run(evaluated, 1, "dp_shard=1", source)[0]
    assert one == again
    for losses in ranks.run(evaluated, 2, "dp_shard=2", source):
        assert losses == pytest.approx([one, one], rel=1e-12)


class Noting(Drawing):
    """Keeps what it has drawn."""

    def __init__(self, source):
        super().__init__(source)
        self.drawn = []

    def draw(self):
        self.drawn.append(super().draw())
        return self.drawn[-1]


def drawn_in_evaluation(layout, source):
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(Noting(source).double(), world)
        sw.evaluate(model, mine([batch(i) for i in range(4)], world), loss=sum_loss)
        return model.drawn


@pytest.mark.parametrize("source", ["python", "numpy", "torch.Generator"])
def test_each_batch_of_an_evaluation_draws_other_numbers_and_the_same_under_every_layout(ranks, source):
    one = ranks.run(drawn_in_evaluation, 1, "dp_shard=1", source)[0]
    assert len(set(one)) == len(one) == 4
    for layout in ("dp_shard=2", "dp_replicate=2"):
        first, second = ranks.run(drawn_in_evaluation, 2, layout, source)
        assert [first[0], second[0], first[1], second[1]] == one


def test_after_a_fork_nothing_was_drawn():
    """Numbers outside of forwards (which sample comes next, an augmentation) go on as if there had been no forward."""
    own = {
        "a": torch.Generator(), "b": np.random.default_rng(1), "c": np.random.RandomState(1), "d": random.Random(1)
    }  # fmt: skip

    def draw():
        numbers = [torch.rand(()), random.random(), np.random.rand(), torch.rand((), generator=own["a"])]
        return [*map(float, numbers), own["b"].random(), own["c"].rand(), own["d"].random()]

    def seed():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        own["a"].manual_seed(1)
        own.update({"b": np.random.default_rng(1), "c": np.random.RandomState(1), "d": random.Random(1)})

    seed()
    wanted = draw()
    seed()
    with forked_streams(7, None, own):
        first = draw()
    assert draw() == wanted
    with forked_streams(7, None, own):
        assert draw() == first != wanted
    assert len(set(first)) == len(first)


def test_generators_are_found_by_the_name_of_their_module(ranks):
    assert ranks.run(generator_names, 1)[0] == ["blocks.1.own"]


def generator_names():
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Drawing("torch.Generator"), world)
        model.blocks[2].same, model.blocks[0].system = model.blocks[1].own, random.SystemRandom()
        return list(runtime_of(model).generators)


class Noisy(torch.nn.Linear):
    """Regression with noise on its output; notes which batch was evaluated under which number."""

    def __init__(self):
        super().__init__(4, 1)
        self.numbers = {}

    def forward(self, batch, state: sw.StepState):
        self.numbers.setdefault(state.micro_batch, set()).update(batch["x"][:, 0].tolist())
        return super().forward(batch["x"]) + torch.randn(len(batch["x"]), 1, dtype=torch.float64)


# Of 13 samples: global_batch, micro_batch, shuffle, and how they come: window by window, batch by batch, or read ahead, twice.
WINDOWS = [(12, 2, False, "windows"), (6, 2, False, "windows"), (8, 8, False, "windows"),
           (6, 2, True, "batches"), (16, 2, True, "ahead")]  # fmt: skip


def evaluated_in_windows(layout):
    """Loss, and the samples under each number."""
    data = [{"x": torch.full((4,), i / 32).double(), "y": torch.tensor(i / 16).double()} for i in range(13)]
    found = []
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(3)
        model = sw.parallelize(Noisy().double(), world)
        for global_batch, micro_batch, shuffle, way in WINDOWS:
            batches = sw.Loader(data, world, global_batch=global_batch, micro_batch=micro_batch, shuffle=shuffle)
            if way == "batches":
                batches = itertools.chain.from_iterable(batches)
            if way == "ahead":
                batches = pickle.loads(pickle.dumps(list(batches))) * 2
            model.numbers.clear()
            out = sw.evaluate(model, batches, loss=squares, count=lambda b: len(b["x"]), forward=named)
            found.append((out["loss"], dict(model.numbers)))
    return found


def named(model, batch, state: sw.StepState):
    return model(batch, state)


def squares(output, batch):
    return (output.squeeze(-1) - batch["y"]).square().sum()


def test_an_evaluation_of_windows_that_the_ranks_do_not_divide_draws_and_counts_the_same(ranks):
    """Paddings were counted among the batches: the loss was 1.69 on four ranks and 1.56 on one."""
    one = ranks.run(evaluated_in_windows, 1, "dp_shard=1")[0]
    assert [sorted(numbers) for _, numbers in one] == [list(range(num)) for num in (7, 7, 2, 7, 14)]
    for layout, size in (("dp_shard=2", 2), ("dp_replicate=4", 4)):
        on_ranks = ranks.run(evaluated_in_windows, size, layout)
        for i, (loss, numbers) in enumerate(one):
            assert [found[i][0] for found in on_ranks] == pytest.approx([loss] * size, rel=1e-12)
            assert all(numbers[number] == samples for found in on_ranks for number, samples in found[i][1].items())
            assert set(numbers) == set().union(*(found[i][1] for found in on_ranks))


def drawn_outside(seed):
    """Before each of two steps, outside of their windows."""
    with sw.init("dp_replicate=2", device="cpu", timeout_s=20, seed=seed) as world:
        numbers = []
        model = sw.parallelize(Drawing("python").double(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
        for _ in range(2):
            numbers.append({"torch": float(torch.rand(())), "numpy": np.random.rand(), "python": random.random()})
            step(mine([batch(i) for i in range(4)], world))
        return numbers


def test_code_of_ones_own_draws_other_numbers_on_each_rank_and_the_same_each_time(ranks):
    found = ranks.run(drawn_outside, 2, 3)
    assert found == ranks.run(drawn_outside, 2, 3)
    others = ranks.run(drawn_outside, 2, 4)
    for source in ("torch", "numpy", "python"):
        numbers = [each[source] for rank in (*found, *others) for each in rank]
        assert len(set(numbers)) == len(numbers) == 8
