"""Loops as people write them, with windows or without: right, or refused in words that say what to change."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.config.options import Sharding
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.parallel import parallelize, runtime_of
from shardwise.train.batch import MicroBatch
from shardwise.train.step import TrainStep
from shardwise.train.window import accumulate, count_tokens, window
from shardwise.world import init

WHERE = [("dp_shard=2", None), ("dp_shard=2", 0), ("dp_replicate=2", None)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def build() -> Net:
    torch.manual_seed(4)
    return Net().double()


def sharded(world, unit: int | None) -> Net:
    return parallelize(build(), world, sharding=None if unit is None else Sharding(min_unit_bytes=unit))


def batch(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(2 + index % 3, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 5, (len(x),), generator=generator)}


def count(given) -> int:
    return len(given["labels"])


def loss_of(model: nn.Module, given) -> Tensor:
    return F.cross_entropy(model(given["x"]), given["labels"], reduction="sum")


def one_process(indices, divisor: float | None = None) -> dict[str, Tensor]:
    plain = build()
    batches = [batch(i) for i in indices]
    for given in batches:
        (loss_of(plain, given) / (divisor or sum(map(count, batches)))).backward()
    return {name: param.grad for name, param in plain.named_parameters()}


def whole(model: nn.Module) -> dict[str, Tensor | None]:
    grads = {name: param.grad for name, param in runtime_of(model).parameters.items()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def assert_equal(found, want) -> None:
    for name, grad in want.items():
        assert found[name] is not None, name
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-14)


# ---- micro-batches that are not run, or do not count ---------------------------------------------------------------------


def skipping_the_last(layout: str, unit: int | None):
    """All ranks `continue` over the last micro-batch; then a window like any other."""
    found = []
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, unit)
        for skips in (True, False):
            model.zero_grad()
            mine = [batch(i) for i in range(world.rank, 6, 2)]
            with window(model, mine, count=count) as w:
                for i, given in enumerate(w):
                    if skips and i == 2:
                        continue
                    (loss_of(model, given) / w.num_tokens).backward()
            found.append(whole(model))
    return found


@pytest.mark.parametrize(("layout", "unit"), WHERE)
def test_a_last_micro_batch_that_is_skipped(ranks, layout, unit):
    """Gradients waited for a backward that did not come: None in that window, and 0.55 to 0.71 off in the next."""
    n = sum(count(batch(i)) for i in range(6))
    for first, second in ranks.run(skipping_the_last, 2, layout, unit):
        assert_equal(first, one_process(range(4), n))
        assert_equal(second, one_process(range(6)))


def with_padding(layout: str, unit: int | None, way: str):
    """Three micro-batches over two ranks: rank 1 runs a copy that is flagged, and the script divides by a number of its own."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, unit)
        mine = [MicroBatch(batch(i), index=i) for i in range(world.rank, 3, 2)]
        if world.rank == 1:
            mine.append(MicroBatch(batch(1), index=3, padding=True))
        if way == "accumulate":
            n = count_tokens(model, mine, count=count)
            for i, given in enumerate(mine):
                with accumulate(model, is_last=i == 1):
                    (loss_of(model, given) / n).backward()
        else:
            with window(model, mine, count=count) as w:
                n = w.num_tokens
                for given in w:
                    (loss_of(model, given) / n).backward()
        return whole(model)


@pytest.mark.parametrize("way", ["window", "accumulate"])
@pytest.mark.parametrize(("layout", "unit"), WHERE)
def test_a_padding_counts_as_0_whatever_its_loss_is_divided_by(ranks, layout, unit, way):
    """With the count read before the loop, an epoch's last window was 0.69 off."""
    for found in ranks.run(with_padding, 2, layout, unit, way):
        assert_equal(found, one_process(range(3)))


# ---- a loss that leads nowhere -------------------------------------------------------------------------------------------


def leading_nowhere(layout: str, unit: int | None):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, unit)

        def loss(_output, given):
            return (given["x"].requires_grad_() ** 2).sum()

        step = TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, count=count, forward=lambda m, b: m(b["x"])
        )
        try:
            step([batch(world.rank)])
        except UsageError as error:
            return error.given
        return None


@pytest.mark.parametrize(("layout", "unit"), WHERE)
def test_a_loss_that_uses_no_parameter(ranks, layout, unit):
    """It has a gradient, so nothing was said: a constant loss, and a gradient norm of 0."""
    for said in ranks.run(leading_nowhere, 2, layout, unit):
        assert said == "a window in which no trainable parameter was used, by any rank"


# ---- loops without windows -----------------------------------------------------------------------------------------------


def without_a_window(layout: str, change: str):
    """A ported loop, with a change that windows refuse: what its first step says."""
    with init(layout, device="cpu", timeout_s=20) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = build()
        plain.blocks[1].requires_grad_(False)
        model = parallelize(plain, world)
        scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        optim = torch.optim.SGD([*model.parameters(), *([scale] if change == "a loss's parameter" else [])], lr=0.1)
        if change == "a new head":
            model.head = nn.Linear(4, 5).double()
        if change == "unfrozen":
            model.blocks[1].requires_grad_(True)
        try:
            for i in range(3):
                given = batch(2 * i + world.rank)
                F.cross_entropy(model(given["x"]) * scale, given["labels"]).backward()
                optim.step()
                optim.zero_grad()
        except ShardwiseError as error:
            return type(error).__name__, error.given, []
        return None, "", [str(w.message) for w in caught if "outside of a window" in str(w.message)]


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ("a new head", "the module changed after it was sharded: a Linear was added or replaced"),
        ("unfrozen", "the module changed after it was sharded: a parameter was unfrozen"),
        ("a loss's parameter", "SGD.step() with a parameter of shape () that no sharded model has"),
    ],
)
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_loop_without_a_window_sees_what_windows_see(ranks, layout, change, given):
    """1.15, 0.71 off and drifting, without a word."""
    for kind, said, _ in ranks.run(without_a_window, 2, layout, change):
        assert (kind, said) == ("UsageError", given)


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_ported_loop_is_told_once_that_gradients_are_sums(ranks, layout):
    """A mean loss and a plain backward, as under DDP: gradients were twice as large on two ranks."""
    for kind, _, said in ranks.run(without_a_window, 2, layout, "nothing"):
        assert kind is None and len(said) == 1
        assert "summed over 2 ranks, not averaged as DDP does" in said[0]


# ---- modules that move their parameters ------------------------------------------------------------------------------------


class Flattens(nn.Linear):
    """Does what cuDNN's recurrent layers do in their first forward: puts the weight where it likes it."""

    moves = True

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.weight.data = self.weight.data.clone()
            self.moves = False
        return super().forward(x)


class Recurrent(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 4, num_layers=2, bidirectional=kind == "GRU")

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def moving(engine: str):
    with init("dp_shard=2" if engine == "fsdp2" else "dp_replicate=2", device="cpu", timeout_s=20) as world:
        model = parallelize(nn.Sequential(Flattens(4, 4), nn.Linear(4, 4)), world)
        try:
            model(torch.ones(2, 4)).sum().backward()
        except UnsupportedError as error:
            return error.name
        return None


def test_a_forward_that_moves_a_gathered_parameter_is_refused(ranks):
    """From the second step on it computed with the weights of the first."""
    assert ranks.run(moving, 2, "fsdp2") == ["0.weight"] * 2
    assert ranks.run(moving, 2, "ddp") == [None] * 2


def recurrent(kind: str):
    with init("dp_shard=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        model = parallelize(Recurrent(kind).double(), world)
        before = model.rnn.weight_ih_l0
        model.rnn.flatten_parameters()
        return model.rnn.weight_ih_l0 is before and "flatten_parameters" in vars(model.rnn)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_left_unflattened(ranks, kind):
    assert ranks.run(recurrent, 2, kind) == [True, True]


# ---- what cannot be sharded ------------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def refused(what: str):
    with init("dp_shard=2", device="cpu", timeout_s=20) as world:
        try:
            if what == "sparse":
                parallelize(Sparse(), world)
            elif what == "shared":
                trunk = nn.Linear(4, 4)
                parallelize(nn.Sequential(trunk, nn.Linear(4, 4)), world)
                parallelize(nn.Sequential(nn.Linear(4, 4), trunk), world)
            else:
                model = sharded(world, 0)
                with window(model, [batch(world.rank)], count=count) as w:
                    for given in w:
                        if what == "autograd.grad":
                            torch.autograd.grad(loss_of(model, given), list(model.parameters()))
                        else:
                            model.blocks[1].weight @ given["x"].t()
        except ShardwiseError as error:
            return type(error).__name__, error.given, error.name
        return None


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sparse", ("UnsupportedError", "a Embedding with sparse=True", "table")),
        ("shared", ("UsageError", "a module with a parameter that is sharded already", "1.weight")),
        ("autograd.grad", ("UnsupportedError", "torch.autograd.grad of the model's parameters", None)),
        ("weight", ("UsageError", "a parameter of one unit used by code outside that unit", None)),
    ],
)
def test_what_cannot_work_is_told_in_three_parts(ranks, what, said):
    assert ranks.run(refused, 2, what) == [said] * 2


def a_unit_before_the_model():
    """A block called by itself before the model ever was; then steps as ever."""
    with init("dp_shard=2", device="cpu", timeout_s=20) as world:
        model = sharded(world, 0)
        with torch.no_grad():
            alone = model.blocks[1](torch.ones(2, 4, dtype=torch.float64))
        with window(model, [batch(world.rank)], count=count) as w:
            for given in w:
                (loss_of(model, given) / w.num_tokens).backward()
        return alone, whole(model)


def test_a_unit_that_is_called_before_the_model(ranks):
    """It worked, and the next step died with 'FSDPCommContext' object has no attribute 'all_gather_state'."""
    for alone, grads in ranks.run(a_unit_before_the_model, 2):
        torch.testing.assert_close(alone, build().blocks[1](torch.ones(2, 4, dtype=torch.float64)))
        assert_equal(grads, one_process(range(2)))


def written_between(layout: str, unit: int | None):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, unit)
        loss = loss_of(model, batch(world.rank))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        try:
            loss.backward()
        except (UsageError, RuntimeError) as error:
            return type(error).__name__, str(error).splitlines()[0]
        return None


@pytest.mark.parametrize(("layout", "unit"), WHERE)
def test_parameters_written_between_a_forward_and_its_backward(ranks, layout, unit):
    """Units are gathered again for backward: gradients were those of no weights at all."""
    for kind, said in ranks.run(written_between, 2, layout, unit):
        if layout == "dp_shard=2":
            assert (kind, said) == ("UsageError", "a backward of a forward that computed with other parameters")
        else:
            assert kind == "RuntimeError" and "modified by an inplace operation" in said


def test_everything_of_this_page_is_public():
    assert sw.window is window and sw.accumulate is accumulate and sw.count_tokens is count_tokens
