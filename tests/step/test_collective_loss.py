"""A loss with a collective in it (a sharded teacher) runs equally often on every rank, whatever each of them has to tell."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn as dnn
from models.tied import Tied
from step.plain import batch, mine, plain_backward, shard, sum_loss
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.data.batch import MicroBatch


def build_teacher():
    torch.manual_seed(9)
    return Tied().double().requires_grad_(False).eval()


def distilled(teacher):
    """Cross entropy and the distance to a teacher at the positions that count."""

    def loss(output, b):
        with torch.no_grad():
            wanted = teacher(b["input_ids"])
        valid = b["labels"] != -100
        return sum_loss(output, b) + (output - wanted)[valid].square().sum()

    return loss


def windows(kind):
    """Two windows of one process. "ignored": the first micro-batch has nothing to count; "short": one is missing, so the
    second rank gets a padding alone."""
    num = 1 if kind == "short" else 4
    return [[batch(10 * w + i, valid=0 if kind == "ignored" and not i else None) for i in range(num)] for w in (0, 1)]


def share(window, world):
    if len(window) == 1:
        return [MicroBatch(window[0], index=world.rank, padding=world.rank > 0)]
    return mine(window, world)


def train(kind):
    world, teacher = shard("dp_shard=2", build=build_teacher)
    with world:
        model = sw.parallelize(build_student(), world, sharding=sw.Sharding(min_unit_bytes=0))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=distilled(teacher))
        return [step(share(window, world)).loss for window in windows(kind)]


def build_student():
    torch.manual_seed(3)
    return Tied().double()


def train_plainly(kind):
    teacher, model = build_teacher(), build_student()
    optim, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for window in windows(kind):
        losses.append(plain_backward(model, window, distilled(teacher)))
        optim.step()
        optim.zero_grad()
    return losses


@pytest.mark.parametrize("kind", ["even", "ignored", "short"])
def test_a_sharded_teacher_in_the_loss_meets_equal_calls_on_every_rank(ranks, kind):
    for losses in ranks.run(train, 2, kind, timeout_s=60):
        assert losses == pytest.approx(train_plainly(kind), rel=1e-12)


def evaluate(num_batches):
    world, teacher = shard("dp_shard=2", build=build_teacher)
    with world:
        model = sw.parallelize(build_student(), world, sharding=sw.Sharding(min_unit_bytes=0))
        own = [batch(10 * world.rank + i, valid=0 if not i else None) for i in range(num_batches[world.rank])]
        return sw.evaluate(model, own, loss=distilled(teacher))


@pytest.mark.parametrize("num_batches", [(3, 2), (2, 0)])
def test_an_evaluation_with_a_sharded_teacher_and_unequal_numbers_of_batches(ranks, num_batches):
    teacher, model = build_teacher(), build_student()
    batches = [batch(10 * rank + i, valid=0 if not i else None) for rank in (0, 1) for i in range(num_batches[rank])]
    total = sum(float(distilled(teacher)(model(b["input_ids"]), b).detach()) for b in batches)
    num = sum(int((b["labels"] != -100).sum()) for b in batches)
    for found in ranks.run(evaluate, 2, num_batches, timeout_s=60):
        assert found["loss"] == pytest.approx(total / num, rel=1e-12)


def mean_of_some(layout):
    """Only rank 1 could tell that its metric is a mean: rank 0's are 0."""

    def loss(output, b):
        total = sum_loss(output, b)
        return {"loss": total, "share": (b["labels"] != -100).double().mean() * world.rank}

    world, model = shard(layout)
    with world:
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
        try:
            step([batch(world.rank)])
        except sw.ConfigError as error:
            return error.given
    return None


def test_a_mean_that_one_rank_could_tell_is_refused_on_all(ranks):
    assert set(ranks.run(mean_of_some, 2, "dp_replicate=2")) == {
        "a loss whose 'share' is a mean, or another value that is no sum"
    }


# ---- collectives over samples, by hand ---------------------------------------------------------------------------------


def _gathered(x):
    return torch.cat(dnn.all_gather(x.contiguous()))


def _of_a_teacher(x):
    """By a model that torch's own FSDP2 gathers."""
    teacher = fully_shard(torch.nn.Linear(x.shape[-1], x.shape[-1], dtype=x.dtype).requires_grad_(False))
    return x - teacher(x)


def _reduced(x):
    total = x.detach().sum()
    dist.reduce(total, dst=0)
    return x * total.sign()


COLLECTIVES = {
    "statistics": lambda x: x - dnn.all_reduce(x.sum()) / 100,
    "features": lambda x: x * _gathered(x.flatten()[:2]).sum(),
    "without gradients": lambda x: x + functional.all_reduce(x.detach().sum(), "sum", dist.group.WORLD),
    "sums of rank 0": _reduced,
    "parameters": _of_a_teacher,
    "one rank's numbers": lambda x: x * dnn.broadcast(torch.ones(()), src=0),
}


class Own(Tied):
    """Its forward makes a collective, or its loss does."""

    how = None

    def forward(self, input_ids):
        output = super().forward(input_ids)
        return output if self.how is None else COLLECTIVES[self.how](output)


def padded(layout, how, where, run):
    """A window, or an evaluation, in which the second rank has one micro-batch less."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(3)
        model = sw.parallelize(Own().double(), world, sharding=sw.Sharding(min_unit_bytes=0))
        model.how = how if where == "forward" else None

        def loss(output, b):
            return sum_loss(COLLECTIVES[how](output) if where == "loss" else output, b)

        given = [MicroBatch(batch(i), index=i, padding=i == 3) for i in (2 * j + world.rank for j in range(2))]
        if run == "evaluation":
            sw.evaluate(model, [b for b in given if not b.padding], loss=loss)
        elif run == "loop":
            with sw.window(model, given) as window:
                for b in window:
                    (loss(model(b["input_ids"]), b) / window.num_tokens).backward()
        else:
            sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)(given)


@pytest.mark.parametrize(
    ("layout", "how", "where", "run"),
    [
        ("dp_shard=2", "statistics", "loss", "step"),
        ("dp_replicate=2", "features", "forward", "loop"),
        ("dp_shard=2", "without gradients", "loss", "evaluation"),
        ("dp_replicate=2", "sums of rank 0", "loss", "loop"),
        ("dp_replicate=2", "one rank's numbers", "loss", "step"),
        ("dp_replicate=2", "parameters", "loss", "step"),
    ],
)
def test_a_copy_that_counts_nowhere_is_in_no_collective(ranks, layout, how, where, run):
    if how in ("one rank's numbers", "parameters"):
        ranks.run(padded, 2, layout, how, where, run)
        return
    what = "a padding of an evaluation" if run == "evaluation" else "a padding of a window"
    with pytest.raises(sw.RankError, match=rf"rank 1 raised UsageError: a collective of your own \(.*{what}"):
        ranks.run(padded, 2, layout, how, where, run)


class Pooled(torch.nn.Module):
    """Two layers and a mean over positions: under cp every rank has the whole output."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2))

    def forward(self, input_ids):
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def contrasted(layout, group, run):
    """Losses of features against those that all ranks have, one loss per window, as SimCLR has them."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(3)
        example = {"input_ids": torch.arange(12).reshape(2, 6)}
        model = sw.parallelize(Pooled().double(), world, example=example, sharding=sw.Sharding(min_unit_bytes=0))
        axes = {f"of the axis {name}": lambda name=name: world.axis(name).group for name in ("dp", "loss")}
        axes["default"] = lambda: None
        axes["all again"] = functools.cache(lambda: dist.new_group(range(world.size)))

        def loss(output, b):
            own = dist.group.WORLD if axes[group]() is None else axes[group]()
            others = functional.all_gather_tensor_autograd(output.contiguous(), 0, own)
            return (output @ others.T).logsumexp(1).sum()

        def rows(_):
            return 2

        given = [{"input_ids": torch.arange(12).reshape(2, 6) + 3 * world.axis("dp").rank}]
        if run == "evaluation":
            return float(sw.evaluate(model, given, loss=loss, count=rows)["loss"])
        if run == "loop":
            with sw.window(model, given, count=rows) as window:
                for b in window:
                    total = loss(model(b["input_ids"]), b) / window.num_tokens
                    total.backward()
            return float(world.axis("dp").reduce(total.detach()))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, count=rows)
        return float(step(given).loss)


@pytest.mark.parametrize(
    ("layout", "group", "run"),
    [
        ("dp_shard=2,tp=2", "default", "step"),
        ("dp_shard=1,tp=2", "default", "loop"),
        ("dp_replicate=2,tp=2", "all again", "step"),
        ("dp_shard=1,tp=2", "default", "evaluation"),
        ("dp_shard=1,cp=2", "default", "step"),
        ("dp_shard=1,cp=2", "of the axis loss", "step"),
    ],
)
def test_samples_are_not_several_times_in_a_collective(ranks, layout, group, run):
    num_ranks = 4 if "=2,tp=2" in layout else 2
    with pytest.raises(
        sw.RankError, match=r"(?s)UnsupportedError: a collective of your own \(.*group=world.axis\('dp'\).group"
    ):
        ranks.run(contrasted, num_ranks, layout, group, run)
    found = ranks.run(contrasted, num_ranks, layout, "of the axis dp", run)
    plain = ranks.run(contrasted, num_ranks // 2, f"dp_shard={num_ranks // 2}", "default", run)
    assert found == pytest.approx([plain[0]] * num_ranks, rel=1e-12)
