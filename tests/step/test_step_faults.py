"""What a step must notice and agree on: means, values that are not finite, zero tokens, two exchanges a window."""

import math
import warnings

import pytest
import torch
from models.tied import Tied
from step.plain import assert_close, batch, build, gradients, mine, plain_backward, shard, sum_loss, values
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, NonFiniteError, RankError, UsageError

TWO = [("dp_replicate=2", None), ("dp_shard=2", None)]


def _step(model, lr=0.1, **options):
    optim = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return optim, sw.TrainStep(model, optim, loss=options.pop("loss", sum_loss), **options)


# ---- not finite -------------------------------------------------------------------------------------------------


def poisoned(output, batch):
    """NaN where the batch says so."""
    return sum_loss(output, batch) * batch["poison"]


poisoned.count = lambda batch: (batch["labels"] != -100).sum()


def _window(world, rank, value):
    found = mine([batch(i) for i in range(4)], world)
    for b in found:
        b["poison"] = torch.tensor(1.0, dtype=torch.float64)
    if world.rank == rank:
        found[-1]["poison"] = torch.tensor(value, dtype=torch.float64)
    return found


def _raises_non_finite(layout, value):
    world, model = shard(layout)
    with world:
        _, step = _step(model, loss=poisoned)
        before = values(model)
        with pytest.raises(NonFiniteError) as caught:
            step(_window(world, 1, value))
        same = all(torch.equal(before[name], tensor) for name, tensor in values(model).items())
        none = all(p.grad is None for p in model.parameters())
        step(_window(world, None, 0.0))
        return caught.value.ranks, caught.value.name, same, none, str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize(("layout", "_engine"), TWO)
def test_nan_on_one_rank_names_that_rank_and_the_first_parameter(ranks, layout, _engine, value):
    for who, name, same, none, text in ranks.run(_raises_non_finite, 2, layout, value):
        assert who == (1,)
        assert name == "gate"  # the root holds it itself, so it comes first
        assert same and none
        assert "the loss of rank 1 is not finite" in text and 'on_nonfinite="skip"' in text


class Normed(Tied):
    """With running statistics, which a forward on NaN would spoil."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, input_ids):
        self.calls += 1
        x = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        return self.head(self.blocks[0](x) * self.gate)


def build_normed():
    torch.manual_seed(3)
    return Normed().double()


def _skips(layout, engine):
    world, model = shard(layout, engine=engine, build=build_normed)
    with world:
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
        step = sw.TrainStep(model, optim, loss=poisoned, scheduler=scheduler, on_nonfinite="skip", max_grad_norm=1.0)
        step(_window(world, None, 0.0))
        before = {n: t.clone() for n, t in (*values(model).items(), *model.named_buffers())}
        bad = step(_window(world, 1, float("nan")))
        after = {**values(model), **dict(model.named_buffers())}
        differ = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
        lr = optim.param_groups[0]["lr"]
        good = step(_window(world, None, 0.0))
        return bad.skipped, good.skipped, differ, round(lr, 6), scheduler.last_epoch, step.num_steps, step.num_skipped


@pytest.mark.parametrize(("layout", "engine"), [*TWO, ("dp_replicate=2", "fsdp2")])
def test_a_skipped_step_changes_nothing_on_any_rank(ranks, layout, engine):
    for found in ranks.run(_skips, 2, layout, engine):
        assert found == (True, False, [], 0.01, 2, 3, 1)


# ---- means ------------------------------------------------------------------------------------------------------


def mean_loss(output, batch):
    return sum_loss(output, batch) / (batch["labels"] != -100).sum()


class Task(sw.TaskModel):
    """Counts on its own, so that the batch can be called anything."""

    def count(self, batch):
        return (batch["labels"] != -100).sum()


class Scaled(nn.Module):
    """A loss that owns a parameter."""

    def __init__(self, mean=False):
        super().__init__()
        self.scale, self.mean = nn.Parameter(torch.tensor([1.5, 0.5], dtype=torch.float64)), mean

    def forward(self, output, batch):
        value = sum_loss(output, batch)
        value = value / (batch["labels"] != -100).sum() if self.mean else value
        return value * self.scale.prod()


def build_task(mean=False):
    return Task(build(), Scaled(mean))


def build_mean_task():
    return build_task(mean=True)


def build_normed_task():
    task = Task(build_normed(), sum_loss)
    task.model.dropout = nn.Dropout(0.5)
    return task


def _refuses_mean(layout, task):
    world, model = shard(layout, **({"build": build_mean_task} if task else {}))
    with world:
        _, step = _step(model, loss=None if task else mean_loss)
        before = values(model)
        # The first micro-batch of rank 0 has no valid token: only rank 1 can tell.
        window = mine([batch(0, valid=0), batch(1)], world)
        with pytest.raises(ConfigError) as caught:
            step(window)
        return str(caught.value), all(torch.equal(before[n], t) for n, t in values(model).items())


@pytest.mark.parametrize("task", [False, True], ids=["loss", "task"])
@pytest.mark.parametrize(("layout", "_engine"), TWO)
def test_a_mean_is_refused_on_every_rank(ranks, layout, _engine, task):
    for text, same in ranks.run(_refuses_mean, 2, layout, task):
        assert "a loss that takes a mean" in text and 'reduction="sum"' in text
        assert same


def _mean_metric(layout, mean, late):
    """Windows run until the metric is refused, and its text; ``late``: it is 0 in the first window, which tells nothing."""
    world, model = shard(layout)
    with world:

        def loss(output, batch):
            total = sum_loss(output, batch)
            hits = batch["hits"].double()
            return {"loss": total, "seen": (batch["labels"] != -100).sum(), "acc": hits.mean() if mean else hits.sum()}

        _, step = _step(model, loss=loss)
        for i in range(3):
            window = mine([batch(0), batch(1)], world)
            for b in window:  # only rank 1 can tell
                b["hits"] = torch.full((2,), float(world.rank == 1 and not (late and i == 0)))
            before = values(model)
            try:
                out = step(window)
            except ConfigError as error:
                return i, str(error), all(torch.equal(before[n], t) for n, t in values(model).items())
        return out.num_tokens, out.metrics, step._check.settled


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(("layout", "_engine"), TWO)
def test_a_mean_among_the_metrics_is_refused_by_name(ranks, layout, _engine, late):
    """It was divided by the tokens once more, and reported without a word."""
    for num_done, text, same in ranks.run(_mean_metric, 2, layout, True, late):
        assert num_done == int(late) and same
        assert (
            "a loss whose 'acc' is a mean" in text and "{'acc': (...).sum()}" in text and "twice over gives 1" in text
        )


def test_sums_among_the_metrics_are_settled(ranks):
    for num, metrics, settled in ranks.run(_mean_metric, 2, "dp_shard=2", False, True):
        assert metrics == {"seen": 1.0, "acc": pytest.approx(2 / num)} and settled == {"loss", "seen", "acc"}


class MeanMetricTask(Task):
    def forward(self, batch):
        total = super().forward(batch)
        return {"loss": total, "level": total.detach() / len(batch["labels"])}


def _mean_metric_of_a_task(layout):
    world, model = shard(layout, build=lambda: MeanMetricTask(build(), sum_loss))
    with world, pytest.raises(ConfigError) as caught:
        _step(model, loss=None)[1](mine([batch(0), batch(1)], world))
    return str(caught.value)


@pytest.mark.parametrize(("layout", "_engine"), TWO)
def test_a_mean_among_the_metrics_of_a_task_is_refused_by_name(ranks, layout, _engine):
    for text in ranks.run(_mean_metric_of_a_task, 2, layout):
        assert "a loss whose 'level' is a mean" in text


def _mean_in_evaluation(name):
    def loss(output, batch):
        total = sum_loss(output, batch)
        mean = total / len(batch["labels"])
        return {"loss": total, "level": mean} if name == "level" else mean

    world, model = shard("dp_shard=2")
    with world, pytest.raises(ConfigError) as caught:
        sw.evaluate(model, [batch(0), batch(1)] if world.rank else [], loss=loss)
    return str(caught.value)


@pytest.mark.parametrize("name", ["loss", "level"])
def test_a_mean_in_an_evaluation_is_refused_on_every_rank(ranks, name):
    for text in ranks.run(_mean_in_evaluation, 2, name):
        assert ("a loss that takes a mean" if name == "loss" else "a loss whose 'level' is a mean") in text


def _trains_task(layout, engine):
    world, model = shard(layout, engine=engine, build=build_task)
    with world:
        _, step = _step(model, loss=None)
        outs = [step(mine([batch(i) for i in range(6)], world)) for _ in range(3)]
        return values(model), [out.loss for out in outs], world.agreement.num_exchanges


@pytest.mark.parametrize(("layout", "engine"), [*TWO, ("dp_replicate=2", "fsdp2")])
def test_a_loss_with_parameters_is_exact_inside_a_task_model(ranks, layout, engine):
    plain = build_task()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        batches = [batch(i) for i in range(6)]
        num = sum(int((b["labels"] != -100).sum()) for b in batches)
        losses.append(0.0)
        for b in batches:
            value = plain(b) / num
            value.backward()
            losses[-1] += float(value.detach())
        optim.step()
        optim.zero_grad()
    for found, got, _ in ranks.run(_trains_task, 2, layout, engine):
        assert_close(found, {n: p.detach() for n, p in plain.named_parameters()})
        assert got == pytest.approx(losses, rel=1e-12)


def _tries_a_task(layout):
    """A step whose task was tried on copies, against one where it was not."""
    found = []
    for tried in (True, False):
        world, model = shard(layout, build=build_normed_task)
        _, step = _step(model, loss=None)
        step._check.settled = set() if tried else {"loss"}
        torch.manual_seed(11)
        out = step(mine([batch(i) for i in range(4)], world))
        found.append((out.loss, values(model), dict(model.named_buffers()), torch.rand(1), step._check.settled))
        world.close()
    return found


@pytest.mark.parametrize(("layout", "_engine"), TWO)
def test_trying_a_task_leaves_no_trace(ranks, layout, _engine):
    for tried, untried in ranks.run(_tries_a_task, 2, layout):
        assert tried[4] == {"loss"} and tried[0] == untried[0] and torch.equal(tried[3], untried[3])
        for a, b in ((tried[1], untried[1]), (tried[2], untried[2])):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _fixed_size(output, batch):
    if len(batch["labels"]) != 2:
        raise ValueError("two rows, please")
    return sum_loss(output, batch)


def _warns_where_untriable():
    world, model = shard("dp_shard=1")
    with world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, step = _step(model, loss=_fixed_size)
        step([batch(0)])
        step([batch(1)])
        return [str(w.message) for w in caught if "twice over" in str(w.message)]


def test_a_loss_that_cannot_be_tried_warns_once(ranks):
    (texts,) = ranks.run(_warns_where_untriable, 1)
    assert len(texts) == 1 and "two rows, please" in texts[0]


def _refuses_loss_with_parameters():
    world, model = shard("dp_shard=1")
    with world, pytest.raises(UsageError) as caught:
        _step(model, loss=Scaled())
    return str(caught.value)


def test_a_loss_with_parameters_is_refused_outside_the_model(ranks):
    (text,) = ranks.run(_refuses_loss_with_parameters, 1)
    assert "sw.TaskModel" in text and text.startswith("scale:")


# ---- counts -----------------------------------------------------------------------------------------------------


def _no_tokens(layout, engine, empty):
    world, model = shard(layout, engine=engine)
    with world:
        batches = [batch(i, valid=0 if i in empty else None) for i in range(4)]
        with sw.window(model, mine(batches, world)) as w:
            for b in w:
                (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
        grads = gradients(model)
        model.zero_grad()
        _, step = _step(model)
        out = step(mine(batches, world))
        return grads, out, w.num_valid


@pytest.mark.parametrize("empty", [(0, 1, 2, 3), (1, 3)], ids=["everywhere", "on rank 1"])
@pytest.mark.parametrize(("layout", "engine"), [*TWO, ("dp_replicate=2", "fsdp2")])
def test_no_valid_tokens(ranks, layout, engine, empty):
    plain = build()
    batches = [batch(i, valid=0 if i in empty else None) for i in range(4)]
    loss = plain_backward(plain, batches)
    for grads, out, num in ranks.run(_no_tokens, 2, layout, engine, empty):
        assert_close(grads, {n: p.grad for n, p in plain.named_parameters()})
        assert num == out.num_tokens == (0 if len(empty) == 4 else num)
        if len(empty) < 4:
            assert out.loss == pytest.approx(loss, rel=1e-12) and not out.skipped
        else:
            assert math.isnan(out.loss) and out.skipped and out.grad_norm == 0.0
            assert all(bool((g == 0).all()) for g in grads.values())


def _two_exchanges(layout, engine):
    world, model = shard(layout, engine=engine, build=build_normed)
    with world:
        found = []
        _step(model)[1](
            mine([batch(i) for i in range(2)], world)
        )  # ranks agree on the order of units in the first window
        for options in (
            {},
            {"max_grad_norm": 0.1},
            {"loss": lambda output, b: {"loss": sum_loss(output, b), "tokens": (b["labels"] != -100).sum()}},
            {"on_nonfinite": "skip", "max_grad_norm": 1.0},
        ):
            _, step = _step(model, **options)
            before = world.agreement.num_exchanges
            out = step(mine([batch(i) for i in range(6)], world))
            found.append(world.agreement.num_exchanges - before)
        before = world.agreement.num_exchanges
        with sw.window(model, mine([batch(i) for i in range(6)], world)) as w:
            for b in w:
                (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
        return [*found, world.agreement.num_exchanges - before], out.metrics


@pytest.mark.parametrize(("layout", "engine"), [*TWO, ("dp_replicate=2", "fsdp2")])
def test_two_exchanges_a_window_whatever_is_on(ranks, layout, engine):
    for counts, _ in ranks.run(_two_exchanges, 2, layout, engine):
        assert counts == [2] * 5


# ---- a rank that has other code ---------------------------------------------------------------------------------


def _raises_alone(layout):
    world, model = shard(layout)
    with world:
        _, step = _step(model)

        def loss(output, b):
            if world.rank == 1:
                raise torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB")
            return sum_loss(output, b)

        step(mine([batch(i) for i in range(4)], world))
        step.loss = loss
        step(mine([batch(i) for i in range(4)], world))


@pytest.mark.parametrize(("layout", "_engine"), TWO)
def test_one_rank_out_of_memory_ends_all_and_is_named(ranks, layout, _engine):
    with pytest.raises(RankError) as caught:
        ranks.run(_raises_alone, 2, layout, timeout_s=15)
    assert caught.value.ranks == (1,)
    assert "out of memory: tried to allocate 3 GiB" in str(caught.value)
