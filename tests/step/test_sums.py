"""Losses as users write them: what is no sum is refused before the first step is taken, and a sum is never taken for a mean."""

import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from step.plain import assert_close, mine, values
from torch import nn

import shardwise as sw

DIM, CLASSES, TIME = 6, 5, 8


def sum_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def mean_of(logits, labels):
    return sum_of(logits, labels) / (labels != -100).sum()


class Tagger(nn.Module):
    """A class for each of TIME places; the ways models return it, or a loss."""

    def __init__(self, returns="logits", auxiliary=None, dropout=0.0, size=None, draws=None):
        super().__init__()
        self.returns, self.auxiliary, self.size, self.draws = returns, auxiliary, size, draws
        self.body = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Dropout(dropout), nn.Linear(DIM, CLASSES))

    def forward(self, x, labels=None):
        if self.size and len(x) != self.size:
            raise ValueError(f"made for {self.size} samples")
        if self.draws:  # in code of its own, of which nothing tells before it runs
            x = F.dropout(x, 0.3, training=self.training or self.draws == "always")
        logits = self.body(x)
        self.penalty = {"mean": x.mean() + logits.mean(), "sum": logits.square().sum()}.get(self.auxiliary)
        if labels is not None:
            return types.SimpleNamespace(
                logits=logits, loss={"mean": mean_of, "sum": sum_of}[self.returns](logits, labels)
            )
        if self.returns == "flat":
            return logits.flatten(0, 1)
        if self.returns == "dict":
            return {"logits": logits, "auxiliary": self.penalty}
        if self.returns == "tuple":
            return logits, None
        return logits


def plain_loss(output, batch):
    return sum_of(output, batch["labels"])


def by_forward(model, batch):
    return model(**batch).loss


def as_it_is(output, batch):
    return output


def contrastive(output, batch):
    """Each sample's features against those of the other samples of the micro-batch."""
    features = F.normalize(output.flatten(1), dim=1)
    return F.cross_entropy(4 * features @ features.T, torch.arange(len(features)), reduction="sum")


def noisy(output, batch):
    kept = torch.rand(output.shape[:2]) < 0.8
    return sum_of(output, batch["labels"].where(kept, -100))


class Task(nn.Module):
    def __init__(self, loss, **options):
        super().__init__()
        self.model, self.loss = Tagger(**options), loss

    def forward(self, batch):
        return self.loss(self.model(batch["x"]), batch)


def take(loss, *, model=None, **options):
    return {"model": lambda: Tagger(**(model or {})), "loss": loss, **options}


NO_SUMS = {
    "mean": take(lambda o, b: mean_of(o, b["labels"])),
    "mean, of a flat output": take(lambda o, b: mean_of(o, b["labels"].flatten()), model={"returns": "flat"}),
    "mean, computed by the model": take(as_it_is, model={"returns": "mean"}, forward=by_forward),
    "mean, by forward without a loss": take(None, model={"returns": "mean"}, forward=by_forward),
    "mean, in an object": take(lambda o, b: o.loss, model={"returns": "mean"}, forward=lambda m, b: m(**b)),
    "mean, of a task with dropout": {
        "model": lambda: Task(lambda o, b: mean_of(o, b["labels"]), dropout=0.3),
        "loss": None,
    },
    **{
        f"mean, of a task that draws {draws}": {
            "model": lambda draws=draws: Task(lambda o, b: mean_of(o, b["labels"]), draws=draws),
            "loss": None,
        }
        for draws in ("in training", "always")
    },
    "sum and mean": take(lambda o, b: mean_of(o, b["labels"]) + 0.2 * plain_loss(o, b)),
    "sum and a little of a mean": take(lambda o, b: plain_loss(o, b) + 1e-4 * o.mean()),
    "sum and a little of a mean, of a task": {
        "model": lambda: Task(lambda o, b: plain_loss(o, b) + 2 * mean_of(o, b["labels"])),
        "loss": None,
    },
    "sum and an auxiliary mean of the output": take(
        lambda o, b: plain_loss(o["logits"], b) + 1e-3 * o["auxiliary"], model={"returns": "dict", "auxiliary": "mean"}
    ),
}

SUMS = {
    "sum": take(plain_loss),
    "of a flat output": take(lambda o, b: sum_of(o, b["labels"].flatten()), model={"returns": "flat"}),
    "of a flat output alone": take(lambda o, b: o.square().sum(), model={"returns": "flat"}),
    "of a tuple": take(lambda o, b: plain_loss(o[0], b), model={"returns": "tuple"}),
    "computed by the model": take(as_it_is, model={"returns": "sum"}, forward=by_forward),
    "by forward without a loss": take(None, model={"returns": "sum"}, forward=by_forward),
    "in an object": take(lambda o, b: o.loss, model={"returns": "sum"}, forward=lambda m, b: m(**b)),
    "and an auxiliary sum": take(
        lambda o, b: plain_loss(o["logits"], b) + 0.1 * o["auxiliary"], model={"returns": "dict", "auxiliary": "sum"}
    ),
    "of a task": {"model": lambda: Task(plain_loss), "loss": None},
    "for one size of batch": take(plain_loss, model={"size": 4}),
    "contrastive": take(contrastive),
    "of signs that cancel": take(lambda o, b: {"loss": plain_loss(o, b), "signed": (o - o.mean(0)).sum()}),
    "with constants of float32": take(
        lambda o, b: F.cross_entropy(
            o.flatten(0, 1), b["labels"].flatten(), weight=torch.ones(CLASSES), reduction="sum"
        )
    ),
    "computed in half": take(lambda o, b: plain_loss(o.bfloat16(), b).float()),
}

RANDOM_SUMS = {
    "of a task with dropout": {"model": lambda: Task(plain_loss, dropout=0.3), "loss": None},
    "of a task that draws in training": {"model": lambda: Task(plain_loss, draws="in training"), "loss": None},
    "of a task that always draws": {"model": lambda: Task(plain_loss, draws="always"), "loss": None},
    "with random numbers in the loss": take(noisy),
}


def batch_of(i, dtype=torch.float32):
    generator = torch.Generator().manual_seed(i)
    labels = torch.randint(0, CLASSES, (4, TIME), generator=generator)
    labels[0, : i % 5] = -100
    batch = {
        "temperature": torch.tensor(1.0),  # no row for each sample
        "x": torch.randn(4, TIME, DIM, generator=generator, dtype=dtype),
        "labels": labels,
        "classes": torch.ones(1, CLASSES),
    }
    return dict(reversed(batch.items())) if i % 2 else batch


def run_forward(case):
    """How the case calls the model: these models know nothing of the tensors beside."""
    if "forward" in case:
        wanted = ("x", "labels")
        return lambda model, batch: case["forward"](model, {name: batch[name] for name in wanted})
    return (lambda model, batch: model(batch)) if case["loss"] is None else (lambda model, batch: model(batch["x"]))


def build(case, dtype=torch.float32):
    torch.manual_seed(0)
    return case["model"]().to(dtype)


def step_of(name, cases, layout, dtype=torch.float32):
    case = cases[name]
    world = sw.init(layout, device="cpu", timeout_s=20)
    model = sw.parallelize(build(case, dtype), world)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    step = sw.TrainStep(model, optim, loss=case["loss"], forward=run_forward(case), count=count)
    return world, model, step


def count(batch):
    return (batch["labels"] != -100).sum()


def refused(name, layout):
    world, model, step = step_of(name, NO_SUMS, layout)
    with world:
        before, told = values(model), []
        window = [batch_of(world.rank)]
        loss, forward = NO_SUMS[name]["loss"], run_forward(NO_SUMS[name])
        for run in (step, lambda w: sw.evaluate(model, w, loss=loss, forward=forward, count=count)):
            try:
                run(window)
                told.append("")
            except sw.ConfigError as error:
                told.append(error.given)
        after = values(model)
        return told, all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.quick(
    "mean",
    "mean, computed by the model",
    "mean, in an object",
    "mean, of a task with dropout",
    "mean, of a task that draws in training",
    "mean, of a task that draws always",
    "sum and mean",
    "sum and a little of a mean, of a task",
)
@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_is_refused_and_no_step_taken(ranks, name):
    wanted = (
        "a loss that takes a mean" if name.startswith("mean") else "a loss whose 'loss' is a sum with something added"
    )
    for layout, num in (("dp_shard=1", 1), ("dp_shard=2", 2)):
        for told, same in ranks.run(refused, num, name, layout):
            assert same and all(text.startswith(wanted) for text in told), told


def trained(name, layout):
    world, model, step = step_of(name, SUMS, layout, torch.float64)
    with world, warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = [step(mine([batch_of(2 * i + j, torch.float64) for j in (0, 1)], world)) for i in (0, 1)]
        loss, forward = SUMS[name]["loss"], run_forward(SUMS[name])
        held_out = sw.evaluate(model, [batch_of(9, torch.float64)], loss=loss, forward=forward, count=count)
        return values(model), [out.loss for out in outs], held_out["loss"]


def trained_plainly(name):
    case = SUMS[name]
    model, losses = build(case, torch.float64), []
    optim, forward = torch.optim.SGD(model.parameters(), lr=0.01), run_forward(case)

    def total(batch):
        output = forward(model, batch)
        sums = output if case["loss"] is None else case["loss"](output, batch)
        return sums["loss"] if isinstance(sums, dict) else sums

    for i in (0, 1):
        batches = [batch_of(2 * i + j, torch.float64) for j in (0, 1)]
        loss = sum(total(b) for b in batches) / sum(count(b) for b in batches)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        last = float(total(batch_of(9, torch.float64)) / count(batch_of(9)))
    return {n: p.detach() for n, p in model.named_parameters()}, losses, last


@pytest.mark.quick(
    "and an auxiliary sum",
    "computed by the model",
    "contrastive",
    "of a task",
    "of a tuple",
    "of signs that cancel",
    "sum",
)
@pytest.mark.parametrize(
    "name", [name for name in SUMS if name not in ("with constants of float32", "computed in half")]
)
def test_a_sum_trains_as_in_one_process_and_says_nothing(ranks, name):
    parameters, losses, last = trained_plainly(name)
    for layout, num in (("dp_shard=1", 1), ("dp_shard=2", 2), ("dp_replicate=2", 2)):
        for found, got, held_out in ranks.run(trained, num, name, layout):
            assert_close(found, parameters)
            assert [*got, held_out] == pytest.approx([*losses, last], rel=1e-11)


def passes(name):
    world, _, step = step_of(name, {**SUMS, **RANDOM_SUMS}, "dp_shard=1")
    with world, warnings.catch_warnings():
        warnings.simplefilter("error")
        return [step([batch_of(i)]).loss for i in range(3)]


@pytest.mark.parametrize("name", ["with constants of float32", "computed in half", *RANDOM_SUMS])
def test_a_sum_that_is_not_exact_is_no_mean(ranks, name):
    assert all(loss == loss for loss in ranks.run(passes, 1, name)[0])


def untriable(layout):
    """A task for one size of batch: its forward fails on copies, after the window's gradients are there."""
    world = sw.init(layout, device="cpu", timeout_s=20)
    with world:
        torch.manual_seed(0)
        model = sw.parallelize(Task(plain_loss, size=4).double(), world, sharding=sw.Sharding(min_unit_bytes=0))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), loss=None, count=count)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step(mine([batch_of(j, torch.float64) for j in (0, 1)], world))
        assert ["made for 4 samples" in str(each.message) for each in told] == [True] * world.is_main  # once, by rank 0
        step(mine([batch_of(2 + j, torch.float64) for j in (0, 1)], world))
        return values(model)


def test_what_cannot_be_tried_is_said_and_the_step_is_right(ranks):
    parameters, _, _ = trained_plainly("of a task")
    for layout, num in (("dp_shard=1", 1), ("dp_shard=2", 2), ("dp_replicate=2", 2)):
        for found in ranks.run(untriable, num, layout):
            assert_close(found, parameters)


def penalised(layout):
    """What is said of a forward that takes a gradient itself, and returns a sum."""
    with sw.init(layout, device="cpu", timeout_s=20) as world, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = sw.parallelize(torch.nn.Linear(4, 2).double(), world)

        def forward(model, batch):
            x = batch["x"].clone().requires_grad_()
            output = model(x).square().sum()
            return output + torch.autograd.grad(output, x, create_graph=True)[0].square().sum()

        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        step = sw.TrainStep(model, optim, loss=None, forward=forward, count=lambda batch: len(batch["x"]))
        step([{"x": torch.ones(3, 4, dtype=torch.float64)}])
        return [str(each.message) for each in told if "could not be tried" in str(each.message)]


def test_a_forward_that_takes_a_gradient_is_named_as_what_cannot_be_tried(ranks):
    first, second = ranks.run(penalised, 2, "dp_replicate=2")
    assert len(first) == 1 and not second
    assert "its forward takes a gradient itself, and is tried without gradients" in first[0]


def edges(output, batch):
    return (output[batch["edges"][0]] - output[batch["edges"][1]]).square().sum()


def nodes(output, batch):
    return F.cross_entropy(output, batch["y"], reduction="sum") + 0.1 * edges(output, batch)


def mean_of_nodes(output, batch):
    return F.cross_entropy(output, batch["y"])


def graph(loss, count):
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(nn.Linear(3, 2), world)
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = {"x": torch.randn(7, 3), "y": torch.arange(7) % 2, "edges": torch.randint(0, 7, (2, 12))}
        step = sw.TrainStep(model, optim, loss=loss, forward=lambda m, b: m(b["x"]), count=count)
        with warnings.catch_warnings(record=True) as said:
            try:
                step([batch])
            except sw.ConfigError as error:
                return error.given
        return str(said[0].message)


def num_nodes(batch):
    return batch["y"].shape[0]


def num_edges(batch):
    return batch["edges"].shape[1]


def test_a_sum_over_the_edges_of_a_graph_is_not_called_a_mean(ranks):
    for loss, count in ((edges, num_edges), (nodes, num_nodes)):
        assert "different numbers of rows" in ranks.run(graph, 1, loss, count)[0]
    assert ranks.run(graph, 1, mean_of_nodes, num_nodes)[0] == "a loss that takes a mean"
