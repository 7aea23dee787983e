"""Replicas take their hooks off parts of a model where a step runs no other backward than its own: the same numbers as with all of them, or
an error."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from models.tempered import Tempered, batch
from techniques.data.loops import Fails
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.data.batch import MicroBatch
from shardwise.errors import RankError, UsageError
from shardwise.techniques.data.outputs import OutputMarks

NUM_STEPS = 4


def count(given) -> int:
    return len(given["labels"])


def penalty_of(model: nn.Module) -> Tensor:
    return 0.3 * sum((param.abs() ** 1.5).sum() for param in model.parameters())


class Recomputed(Tempered):
    """Its blocks are recomputed in a backward that runs inside of the step's."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=True)
        return self.head(x)


class Losses:
    """Losses of a step, by name. What begins in the middle of a run has no hooks that would show where it came through."""

    def __init__(self, name: str, model: nn.Module):
        self.model, self.step, self.more = model, 0, getattr(self, name.replace(" ", "_"))

    def __call__(self, output: Tensor, given) -> Tensor:
        return F.cross_entropy(output, given["labels"], reduction="sum") + self.more(given)

    def alone(self, _given):
        return 0.0

    recomputed = past_the_output = of_recomputed_parts = compiled = alone

    def with_a_penalty(self, given) -> Tensor:
        return count(given) * penalty_of(self.model)

    def with_the_backward_of_a_part(self, given):
        self.model.blocks[1](given["x"]).pow(2).sum().backward()
        return 0.0

    def with_input_gradients(self, given) -> Tensor:
        x = given["x"].clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        return grad.pow(2).sum()

    def with_a_penaltys_backward_later(self, _given):
        if self.step > 2:
            penalty_of(self.model).backward()
        return 0.0

    def with_the_backward_of_a_part_later(self, given):
        return self.with_the_backward_of_a_part(given) if self.step > 2 else 0.0

    def with_another_forward_later(self, given):
        """Its backward shows itself by the model's own output."""
        if self.step > 2:
            self.model(2 * given["x"]).pow(2).sum().backward()
        return 0.0

    def with_input_gradients_later(self, given):
        return self.with_input_gradients(given) if self.step > 2 else 0.0


def of_parts(model: nn.Module, given) -> Tensor:
    return model.head(torch.tanh(model.blocks[1](given["x"])))


def adding_to_its_gradient(x: Tensor) -> Tensor:
    """As a balance loss of experts does: its gradient is there whatever the loss is divided by."""
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda grad: grad + 0.1)
    return x


def of_recomputed_parts(model: nn.Module, given) -> Tensor:
    def first(x: Tensor) -> Tensor:
        return adding_to_its_gradient(torch.tanh(model.blocks[0](x)))

    def second(x: Tensor) -> Tensor:
        return model.head(torch.tanh(model.blocks[1](x)))

    x = checkpoint(first, given["x"].clone().requires_grad_(), use_reentrant=True)
    return checkpoint(second, x, use_reentrant=True)


FORWARDS = {"past the output": of_parts, "of recomputed parts": of_recomputed_parts}


def hooks_of(kept: bool) -> contextlib.AbstractContextManager:
    return mock.patch.object(OutputMarks, "begin", lambda *_, **__: None) if kept else contextlib.nullcontext()


def trained(name: str, *, kept: bool) -> tuple[dict[str, Tensor], int]:
    """Parameters after some steps, and how many modules had a hook in the last forward. ``kept``: all hooks stay on."""
    with hooks_of(kept), sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(4)
        model = sw.parallelize((Recomputed if name == "recomputed" else Tempered)().double(), world)
        if name == "compiled":
            model.compile(backend="eager")
        loss = Losses(name, model)
        forward = {"forward": FORWARDS[name]} if name in FORWARDS else {}
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss, count=count, **forward)
        hooked: list[int] = []
        model.head.register_forward_pre_hook(
            lambda *_: hooked.append(sum(bool(part._forward_hooks) for part in model.modules()))
        )
        for number in range(NUM_STEPS):
            loss.step = number
            place = [world.rank, 2 + world.rank]
            window = [MicroBatch({**batch(4 * number + i)}, index=i) for i in place]
            if number > 1 and world.rank:  # the first one when hooks are off
                window[1].padding = True
            step(window)
        assert all(part._forward_hooks for part in model.modules())
        return dict(model.named_parameters()), hooked[-1]


NAMES = [name.replace("_", " ") for name in vars(Losses) if not name.startswith("__")]
REFUSED = ["with a penaltys backward later", "with the backward of a part later"]


@pytest.mark.quick(
    "recomputed", "past the output", "with a penalty", "with input gradients later", "with the backward of a part"
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*REFUSED, "compiled")])
def test_numbers_are_those_of_all_hooks(ranks, name):
    own, with_all = (ranks.run(trained, 2, name, kept=kept) for kept in (False, True))
    for (found, _), (want, _) in zip(own, with_all, strict=True):
        for key in want:
            torch.testing.assert_close(found[key], want[key], rtol=1e-12, atol=1e-14)


def test_a_replica_that_torch_has_compiled_as_a_whole_trains(ranks):
    """Its graph hides the hooks on its outputs; no parameter seemed to be used."""
    for (found, _), (want, _) in zip(
        *(ranks.run(trained, 2, name, kept=False) for name in ("compiled", "alone")), strict=True
    ):
        for key in want:
            torch.testing.assert_close(found[key], want[key], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "num"), [("alone", 1), ("with a penalty", 1), ("with the backward of a part", 5)])
def test_they_are_off_where_a_step_has_no_other_backward(ranks, name, num):
    for _, hooked in ranks.run(trained, 2, name, kept=False):
        assert hooked == num  # the model's own; or those from which losses are taken too


@pytest.mark.parametrize("name", REFUSED)
def test_what_begins_later_beside_the_models_outputs_is_refused(ranks, name):
    """Nothing shows whether it is a weight penalty, which counts once."""
    with pytest.raises(RankError) as caught:
        ranks.run(trained, 2, name, kept=False)
    assert isinstance(caught.value.__cause__, UsageError)
    assert "nothing that the model has computed" in str(caught.value) and "from the first step on" in str(caught.value)


def two_steps(*, kept: bool) -> dict[str, Tensor]:
    """Two steps take turns on one model, and the loss of one runs a backward of its own."""
    with hooks_of(kept), sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(4)
        model = sw.parallelize(Tempered().double(), world)
        losses = [Losses(name, model) for name in ("alone", "with the backward of a part")]
        steps = [
            sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss, count=count) for loss in losses
        ]
        for number in range(NUM_STEPS):
            steps[number % 2]([batch(4 * number + i) for i in (world.rank, 2 + world.rank)])
        return dict(model.named_parameters())


def test_two_steps_of_one_model(ranks):
    for found, want in zip(ranks.run(two_steps, 2, kept=False), ranks.run(two_steps, 2, kept=True), strict=True):
        assert all(torch.equal(found[name], want[name]) for name in want)


def after_a_failure(*, kept: bool):
    """A backward that raised when it had reached some parameters, is caught in the window, and another follows."""
    with hooks_of(kept), sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(4)
        model = sw.parallelize(Tempered().double(), world)
        mine = [batch(i) for i in range(world.rank, 6, 2)]
        with sw.window(model, mine, count=count) as w:
            for i, given in enumerate(w):
                if i == 1:
                    fails = given["x"].clone().requires_grad_()
                    output = model.head(torch.tanh(model.blocks[2](Fails.apply(fails))))
                    with contextlib.suppress(MemoryError):
                        (output.sum() / w.num_tokens).backward()
                (F.cross_entropy(model(given["x"]), given["labels"], reduction="sum") / w.num_tokens).backward()
        return {name: param.grad for name, param in model.named_parameters()}


def test_after_a_backward_that_raised(ranks):
    for found, want in zip(
        ranks.run(after_a_failure, 2, kept=False),
        ranks.run(after_a_failure, 2, kept=True),
        strict=True,
    ):
        assert all(torch.equal(found[name], want[name]) for name in want if want[name] is not None)


def with_hooks_of_ones_own():
    """A hook on a parameter, registered between steps, and one that a hook registers while a backward runs."""
    with sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(4)
        model = sw.parallelize(Tempered().double(), world)
        step = sw.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            loss=lambda output, given: F.cross_entropy(output, given["labels"], reduction="sum"),
            count=count,
        )
        seen: list[str] = []
        for number in range(NUM_STEPS):
            step([batch(4 * number + i) for i in (world.rank, 2 + world.rank)])
            if number == 1:
                handle = model.head.weight.register_hook(lambda _: seen.append("between"))
        handle.remove()
        step([batch(40 + i) for i in (world.rank, 2 + world.rank)])
        return seen


def test_hooks_of_ones_own_stay(ranks):
    for seen in ranks.run(with_hooks_of_ones_own, 2):
        assert seen == ["between"] * 4  # two steps of two micro-batches
