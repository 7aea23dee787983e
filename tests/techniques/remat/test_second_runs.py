"""What a second run could see differently: generators of the block's own, a state outside torch, buffers under the compiler."""

import types
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Compile, Remat
from shardwise.errors import UnsupportedError
from shardwise.parallel import parallelize
from shardwise.step.window import window
from shardwise.world import init

EAGER = Compile(backend="aot_eager")
GENERATOR = torch.Generator()  # that no module holds


class OwnDropout(nn.Module):
    """A residual block whose masks come from a generator that it keeps; small beside its input, as at the start of training."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.linear, self.gen = nn.Linear(dim, dim), torch.Generator().manual_seed(5)
        nn.init.normal_(self.linear.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + y * (torch.rand(y.shape, generator=self.gen) < 0.9) / 0.9


class EarlyDropout(OwnDropout):
    """The same with the generator as its first attribute, before those that each module has."""

    def __init__(self, dim: int = 64):
        self.gen = torch.Generator()
        super().__init__(dim)


class LaterDropout(OwnDropout):
    """The same, given its generator between two windows."""

    def __init__(self, dim: int = 64):
        super().__init__(dim)
        self.gen = None

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) if self.gen is None else super().forward(x)


class Shared(nn.Module):
    """The same with a generator of the file's."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.normal_(self.linear.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + y * (torch.rand(y.shape, generator=GENERATOR) < 0.9) / 0.9


@dataclass
class Record:
    x: Tensor

    def square(self) -> Tensor:
        return self.x.square()


class Recorded(Shared):
    """The same, from record to record."""

    def forward(self, x: Tensor | Record) -> Record:
        return Record(super().forward(x.x if isinstance(x, Record) else x))


class Shuffled(Shared):
    """Draws an order: sums of its result, and of its squares, stay."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))[torch.randperm(len(x), generator=GENERATOR)]


class Box:
    def __init__(self, x: Tensor):
        self.x = x

    def square(self) -> Tensor:
        return self.x.square()


class Boxed(Shared):
    """Changes the object that it is given, of a class that nothing looks into by itself."""

    def forward(self, box: Tensor | Box) -> Box:
        box = box if isinstance(box, Box) else Box(box)
        box.x = box.x + torch.tanh(self.linear(box.x))
        return box


class Counting(nn.Module):
    """A buffer that is written in place and then read."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x + torch.tanh(self.linear(x)) / self.n


class Beside(nn.Module):
    """A buffer that is written, and Python state beside it, deep, that says how often."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.linear, self.state = nn.Linear(dim, dim), {"calls": [0]}
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"][0] += 1
        self.total += x.detach().mean()
        return x + torch.tanh(self.linear(x)) / self.state["calls"][0] + self.total


class Replacing(Beside):
    """The same with a buffer that each forward replaces."""

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"][0] += 1
        self.total = self.total + x.detach().mean()
        return x + torch.tanh(self.linear(x)) / self.state["calls"][0] + self.total


class Registering(Beside):
    """The same with a buffer that the first forward registers."""

    def __init__(self, dim: int = 64):
        super().__init__(dim)
        del self.total

    def forward(self, x: Tensor) -> Tensor:
        if "total" not in self._buffers:
            self.register_buffer("total", torch.zeros(()), persistent=False)
        return super().forward(x)


class Spectral(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Normed(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.linear, self.norm = nn.Linear(dim, dim), nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(block: type[nn.Module], steps: int = 1, **options) -> dict[str, Tensor] | tuple[str | None, str]:
    """Gradients of the last of so many windows, and buffers; or the name and words of our refusal."""
    with init("dp_shard=1", device="cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        GENERATOR.manual_seed(5)
        model = parallelize(block() if isinstance(block, partial) else Model(block), world, **options)
        x = torch.randn(32, 64)
        try:
            for step in range(steps):
                model.zero_grad()
                for part in model.modules() if step else ():
                    if isinstance(part, LaterDropout):
                        part.gen = torch.Generator().manual_seed(step)
                with window(model, [{"x": x}], count=len) as w:
                    for each in w:
                        model(each["x"]).square().mean().backward()
        except UnsupportedError as error:
            return error.name, str(error)
        numbers = torch.tensor([m.num for m in model.modules() if isinstance(m, Counts)])
        return {n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers()) | {"numbers": numbers}


@pytest.mark.parametrize("block", [OwnDropout, EarlyDropout, LaterDropout])
def test_a_generator_that_a_module_keeps_draws_the_same_again(ranks, block):
    plain, again = (ranks.run(train, 1, block, 2, remat=remat)[0] for remat in (None, "full"))
    assert all(torch.equal(again[name], plain[name]) for name in plain)


@pytest.mark.parametrize("block", [Beside, Replacing, Registering])
def test_a_written_buffer_and_the_state_beside_it_are_as_in_the_first_run(ranks, block):
    plain, again = (ranks.run(train, 1, block, 3, remat=remat)[0] for remat in (None, "full"))
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert plain["blocks.0.total"] != 0


class Halving(OwnDropout):
    """Puts a hook on what it is given: on the gradient of the block before."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad / 2)
        return super().forward(x)


class Inner(OwnDropout):
    """Computes a force in forward, as the gradient of an energy with a factor that it keeps and changes, and draws masks before and after."""

    def __init__(self, dim: int = 64):
        super().__init__(dim)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.factor.mul_(0.9)
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad((self.factor * self.linear(place).tanh() ** 3).sum(), place, create_graph=True)
        return super().forward(x + force)


@pytest.mark.parametrize("block", [Halving, Inner])
def test_gradients_that_a_forward_takes_part_in_are_as_in_one_run(ranks, block):
    plain, again = (ranks.run(train, 1, block, 3, remat=remat)[0] for remat in (None, "full"))
    assert all(torch.equal(again[name], plain[name]) for name in plain)


class Counts(nn.Module):
    """Counts of what blocks see, and how often they were written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))
        self.register_buffer("late", torch.zeros(64))
        self.num = 0

    def add(self, x: Tensor) -> None:
        self.seen += (x.detach() > 0).sum(0)
        self.num += 1


class Counted(nn.Module):
    """A block that writes counts of another module, found in another way each."""

    def __init__(self, how: str, counts: Counts):
        super().__init__()
        self.how, self.held, self.linear, self.runs = how, [counts], nn.Linear(64, 64), 0
        self.tensors = [counts.seen]

    def forward(self, x: Tensor, counts: Counts, seen: Tensor | None, before: "Counted | None") -> Tensor:
        self.runs += self.training
        if self.how == "held":
            self.held[0].add(x)
        elif self.how == "passed":
            counts.add(x)
        elif self.how == "tensor held":
            self.tensors[0].add_((x.detach() > 0).sum(0))
        elif self.how == "tensor passed":
            seen += (x.detach() > 0).sum(0)
        elif self.how == "replaced":
            counts.seen = counts.seen + (x.detach() > 0).sum(0)
        elif self.how == "of a block" and before is not None:
            before.own += 1
        return x + torch.tanh(self.linear(x))


class Routed(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.counts = Counts()
        self.blocks = nn.ModuleList(Counted(how, self.counts) for _ in range(2))
        for block in self.blocks:
            block.register_buffer("own", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        before = None
        for block in self.blocks:
            x = block(x, self.counts, self.counts.seen if block.how == "tensor passed" else None, before)
            before = block
        return x


@pytest.mark.parametrize("how", ["held", "passed", "tensor held", "replaced"])
def test_a_buffer_outside_of_the_block_counts_a_batch_once(ranks, how):
    plain, again = (ranks.run(train, 1, partial(Routed, how), 3, remat=remat)[0] for remat in (None, "full"))
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert plain["counts.seen"].any() and plain["numbers"].tolist() == ([6] if how in ("held", "passed") else [0])


@pytest.mark.parametrize(
    ("how", "words"), [("tensor passed", "writes into a tensor"), ("of a block", "another such block")]
)
def test_a_buffer_that_is_not_kept_is_refused(ranks, how, words):
    name, text = ranks.run(train, 1, partial(Routed, how), remat="full")[0]
    assert name.startswith("blocks.") and words in text


class Overflowing(nn.Linear):
    def __init__(self, dim: int = 64):
        super().__init__(dim, dim)
        nn.init.constant_(self.weight, 1e38)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()  # infinite, and no NaN


def test_two_runs_that_overflow_alike_are_alike(ranks):
    found = ranks.run(train, 1, Overflowing, remat="full")[0]
    assert not isinstance(found, tuple)  # what is not finite is the step's to tell


@pytest.mark.parametrize("block", [Shared, Recorded, Shuffled, Boxed])
def test_what_cannot_be_put_back_is_told(ranks, block):
    name, text = ranks.run(train, 1, block, 6, remat="full")[0]
    assert name.startswith("blocks.") and "differs from its first" in text


@pytest.mark.parametrize(
    ("block", "remat", "attr"),
    [(Counting, None, "n"), (Counting, "full", "n"), (Spectral, Remat(), "linear.parametrizations.weight.0._u")],
)
def test_a_buffer_that_a_compiled_block_writes_is_refused(ranks, block, remat, attr):
    name, text = ranks.run(train, 1, block, remat=remat, compile=EAGER)[0]
    assert name == "blocks.0" and f"writes its buffer {attr!r}" in text


@pytest.mark.quick("Spectral-None", "Normed-full")
@pytest.mark.parametrize(("block", "remat"), [(Spectral, None), (Normed, None), (Normed, "full")])
def test_a_buffer_that_does_no_harm_is_right_when_compiled(ranks, block, remat):
    plain, compiled = (ranks.run(train, 1, block, 2, **given)[0] for given in ({}, {"remat": remat, "compile": EAGER}))
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-5, atol=1e-7)


class Recomputing(nn.Module):
    """A block that people checkpoint by themselves, and that differs the second time."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.linear, self.calls = nn.Linear(dim, dim), 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.grows, x, use_reentrant=False)

    def grows(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x[: 8 * self.calls]))


class Stumbling(nn.Linear):
    """Its second run makes other tensors, which torch finds after it."""

    calls = 0  # of the class: not put back

    def __init__(self, dim: int = 64):
        super().__init__(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        Stumbling.calls += 1
        return super().forward(x) if Stumbling.calls % 2 else torch.tanh(super().forward(x).repeat(2, 1))[: len(x)]


def two_models(first: type[nn.Module], second: type[nn.Module], remat: str | None) -> tuple[str, str | None, str]:
    """The error of a loss through ``second``, then through ``first``, whose blocks run again: its type, name and words."""
    with init("dp_shard=1", device="cpu", timeout_s=20) as world:
        base = parallelize(Model(first), world, remat="full")
        head = parallelize(nn.Sequential(second()), world, remat=remat and Remat(targets=("0",)))
        x = torch.randn(32, 64)
        try:
            with window(base, [{"x": x}], count=len) as w:
                for each in w:
                    base(each["x"]).square().mean().backward()
                    head(base(each["x"])).square().mean().backward()
        except RuntimeError as error:
            return type(error).__name__, getattr(error, "name", None), str(error)
        return "", None, ""


def test_of_two_models_the_block_that_differs_is_named(ranks):
    kind, name, text = ranks.run(two_models, 1, OwnDropout, Stumbling, "full")[0]
    assert (kind, name) == ("UnsupportedError", "0"), text


def test_a_checkpoint_of_ones_own_that_differs_is_not_laid_to_another_models_block(ranks):
    kind, _, text = ranks.run(two_models, 1, OwnDropout, Recomputing, None)[0]
    assert kind == "CheckpointError", text


class Stateful(nn.Module):
    """A block without a buffer, whose result depends on how often it has run; ``late``: on how often with five rows."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 6), kind
        self.number, self.rebound, self.tensor = 0, torch.zeros(()), torch.zeros(())
        self.listed, self.array, self.queue = [0], np.zeros(1), deque()
        self.table = torch.zeros(3, 6, dtype=torch.float64)  # is copied, and as large as what the block copies itself

    def count(self, rows):
        if self.kind == "number" or (self.kind == "late" and rows == 5):
            self.number += 1
        elif self.kind == "rebound":
            self.rebound = self.rebound + 1
        elif self.kind == "tensor":
            self.tensor += 1
        elif self.kind == "listed":
            self.listed[0] += 1
        elif self.kind == "array":
            self.array += 1
        elif self.kind == "queue":
            self.queue.append(1)

    @property
    def total(self):
        return (
            self.number
            + self.listed[0]
            + float(self.rebound)
            + float(self.tensor)
            + float(self.array[0])
            + len(self.queue)
        )

    def forward(self, x):
        self.count(len(x))
        return torch.tanh(self.layer(x.clone())) * (1 + 0.1 * self.total)


def gradients(kind, remat):
    """After each of some windows: the loss and the count of the first block; and the gradients of the last."""
    torch.manual_seed(0)
    found = []
    with sw.init("dp_shard=1", device="cpu") as world:
        built = nn.Sequential(nn.ModuleList([Stateful(kind) for _ in range(2)]), nn.Linear(6, 2))
        built.forward = types.MethodType(lambda self, x: self[1](self[0][1](self[0][0](x))), built)
        model = sw.parallelize(built.double(), world, remat=remat)
        optim = torch.optim.SGD(model.parameters(), lr=0.01)  # the first step chooses what is kept
        for number in range(19 if kind == "late" else 3):
            x = torch.randn(5 if number == 18 else 3, 6, dtype=torch.float64)
            with sw.accumulate(model, is_last=True):
                loss = model(x).square().sum()
                loss.backward()
            found += [float(loss.detach()), model[0][0].total]
            grads = [sw.full_tensor(p.grad) for p in model.parameters()]
            optim.step()
            optim.zero_grad()
    return found, grads


@pytest.mark.parametrize("remat", ["full", "selective", Remat(mode="selective", save=("aten.clone", "matmul"))])
@pytest.mark.parametrize("kind", ["number", "rebound", "tensor", "listed", "array", "queue", "late"])
def test_the_state_of_a_block_without_a_buffer_is_as_in_the_first_run(kind, remat):
    plain, grads = gradients(kind, None)
    again, ours = gradients(kind, remat)
    assert again == pytest.approx(plain, rel=1e-12)
    torch.testing.assert_close(ours, grads, rtol=1e-12, atol=1e-12)
