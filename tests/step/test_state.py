"""A forward that takes ``state`` is given the step that it runs in: an annealed loss has the numbers of one process."""

from typing import Optional

import pytest
import torch
import torch.nn.functional as F
from step.plain import assert_close, batch, build, mine, shard, sum_loss, values

import shardwise as sw


class Annealed(torch.nn.Module):
    """A model and a loss with a term that grows with the steps, as a user writes them for one process."""

    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, batch, state):
        logits = self.net(batch["input_ids"])
        smooth = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum", label_smoothing=0.1
        )
        weight = 0.25 * state.step + 0.1 * state.micro_batch
        return sum_loss(logits, batch) + weight * smooth


def annealed(model, batch, state):
    """The same, as a function for ``forward=``."""
    return Annealed.forward(model, batch, state)


def rows(batch):
    return (batch["labels"] != -100).sum()


def _window(number):
    return [batch(4 * number + i) for i in range(4)]


def _plain():
    model = Annealed()
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(3):
        tokens = sum(int(rows(b)) for b in _window(number))
        for i, b in enumerate(_window(number)):
            (model(b, sw.StepState(step=number + 1, micro_batch=i)) / tokens).backward()
        optim.step()
        optim.zero_grad()
    return values(model)


class Function(torch.nn.Module):
    """For ``forward=``: its own forward takes another thing."""

    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, batch, step, micro_batch):
        return Annealed.forward(self, batch, sw.StepState(step, micro_batch))


def by_numbers(model, batch, state):
    return model(batch, state.step, state.micro_batch)


def _sharded(layout, engine):
    done = []
    for make, options in ((Annealed, {}), (Function, {"forward": by_numbers})):
        world, model = shard(layout, engine=engine, build=make)
        with world:
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), loss=None, count=rows, **options)
            for number in range(3):
                step(mine(_window(number), world))
            done.append(values(model))
    return done


@pytest.mark.parametrize(("layout", "engine", "size"), [("dp_replicate=2", None, 2), ("dp_shard=2", None, 2)])
def test_an_annealed_loss_has_the_numbers_of_one_process(ranks, layout, engine, size):
    wanted = _plain()
    for done in ranks.run(_sharded, size, layout, engine):
        for tensors in done:
            assert_close(tensors, wanted)


def _seen():
    seen, given = [], []

    def forward(model, batch, state: sw.StepState | None = None):
        seen.append(state)
        return model.net(batch["input_ids"])

    def recurrent(model, batch, state=None):
        given.append(state)
        return model.net(batch["input_ids"])

    class Task(sw.TaskModel):
        def forward(self, batch, state):
            seen.append(state)
            return super().forward(batch, state)

    data = [{name: tensor[0] for name, tensor in batch(i).items()} for i in range(10)]
    with sw.init(device="cpu") as world:
        loader = sw.Loader(data, world, global_batch=4, micro_batch=2)
        model = sw.parallelize(Annealed(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss, forward=forward)
        for _ in range(2):
            for window in loader:
                step(window)
        sw.evaluate(model, loader, loss=sum_loss, forward=forward)
        trained = [s for s in seen if s.is_training]
        evaluated = [s for s in seen if not s.is_training]
        del seen[:]
        task = sw.parallelize(
            Task(build(), sum_loss, forward=lambda model, b, state: forward(Net(model), b, state)), world
        )
        sw.TrainStep(task, torch.optim.SGD(task.parameters(), lr=0.1), loss=None)([batch(0)])
        own = sw.parallelize(Annealed(), world)
        sw.TrainStep(own, torch.optim.SGD(own.parameters(), lr=0.1), loss=sum_loss, forward=recurrent)([batch(0)])
    return trained, evaluated, seen, given


class Net:
    def __init__(self, net):
        self.net = net


def test_what_a_state_says(ranks):
    ((trained, evaluated, of_task, given),) = ranks.run(_seen, 1)
    first, *_, last = trained
    assert first == sw.StepState(step=1, micro_batch=0, epoch=0, samples=0)
    assert last == sw.StepState(step=6, micro_batch=0, epoch=1, samples=8)
    assert sw.StepState(step=5, micro_batch=1, epoch=1, samples=4) in trained
    assert {s.step for s in evaluated} == {6} and [s.micro_batch for s in evaluated] == [0, 1, 2, 3, 4]
    assert len(of_task) > 1 and set(of_task) == {sw.StepState(step=1)}, (
        "the subclass's own forward, and the function that it was given"
    )
    assert set(given) == {None}, "a recurrent model's own state=None stays its own"


class TrainStepState:
    """A user's own, of a name that ours is a part of."""


def own_type(model, batch, mine: TrainStepState | None = None):
    return mine, model.net(batch["input_ids"])


def own_type_as_text(model, batch, mine: "TrainStepState | None" = None):
    return mine, model.net(batch["input_ids"])


def own_type_nowhere(model, batch, mine: "hidden.TrainStepState" = None):  # noqa: F821
    return mine, model.net(batch["input_ids"])


def states(model, batch, mine: list[sw.StepState] | None = None):
    return mine, model.net(batch["input_ids"])


def ours(model, batch, now: sw.StepState | None = None):
    return now, model.net(batch["input_ids"])


def ours_as_text(model, batch, now: "sw.StepState | None" = None):
    return now, model.net(batch["input_ids"])


def ours_within_text(model, batch, now: Optional["sw.StepState"] = None):
    return now, model.net(batch["input_ids"])


def ours_nowhere(model: "hidden.Model", batch, now: "StepState | None" = None):  # noqa: F821
    return now, model.net(batch["input_ids"])


OWN = (own_type, own_type_as_text, own_type_nowhere, states)
OURS = (ours, ours_as_text, ours_within_text, ours_nowhere)


def _given():
    given = {}
    with sw.init(device="cpu") as world:
        model = sw.parallelize(Annealed(), world)
        for forward in (*OWN, *OURS):

            def loss(output, batch, name=forward.__name__):
                given[name] = output[0]
                return sum_loss(output[1], batch)

            sw.evaluate(model, [batch(0)], loss=loss, forward=forward)
    return given


def test_a_state_is_given_by_its_class_and_not_by_a_part_of_its_name(ranks):
    (given,) = ranks.run(_given, 1)
    assert [given[forward.__name__] for forward in OWN] == [None] * len(OWN)
    assert [type(given[forward.__name__]) for forward in OURS] == [sw.StepState] * len(OURS)


def test_verify_compares_a_forward_that_takes_a_state(ranks):
    windows = [_window(number) for number in range(2)]
    report = sw.verify(Annealed, "dp_shard=2", batches=windows, loss=None, count=rows, run=ranks.run)
    assert report.err <= 1e-12
    report = sw.verify(
        Function, "dp_shard=2", batches=windows, loss=keep, count=rows, forward=by_numbers, run=ranks.run
    )
    assert report.err <= 1e-12


def keep(output, batch):
    return output
