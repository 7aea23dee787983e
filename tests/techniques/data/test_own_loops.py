"""Loops as people write them, with windows or without: right, or refused in words that say what to change."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from models.tempered import Tempered, batch, build
from techniques.data.loops import Fails
from torch import Tensor, nn

import shardwise as sw
from shardwise import Sharding
from shardwise.data.batch import MicroBatch
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.parallel import parallelize, runtime_of
from shardwise.step.own_loop import accumulate, count_tokens
from shardwise.step.step import TrainStep
from shardwise.step.window import window
from shardwise.world import init

WHERE = [("dp_shard=2", None), ("dp_shard=2", 0), ("dp_replicate=2", None)]
HSDP = ("dp_replicate=2,dp_shard=2", 0)


def sharded(world, unit: int | None) -> Tempered:
    return parallelize(build(), world, sharding=None if unit is None else Sharding(min_unit_bytes=unit))


def count(given) -> int:
    return len(given["labels"])


def loss_of(model: nn.Module, given) -> Tensor:
    return model.temperature.exp() * F.cross_entropy(model(given["x"]), given["labels"], reduction="sum")


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
    """Five micro-batches over two ranks: rank 1 runs a copy of its last that is flagged, and the script divides by a number of
    its own."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, unit)
        mine = [MicroBatch(batch(i), index=i) for i in range(world.rank, 5, 2)]
        if world.rank == 1:
            mine.append(MicroBatch(batch(3), index=5, padding=True))
        if way == "window":
            with window(model, mine, count=count) as w:
                n = w.num_tokens
                for given in w:
                    (loss_of(model, given) / n).backward()
        else:
            n = count_tokens(model, mine, count=count)
            backwards = way == "accumulate, from the last on"
            for i, given in enumerate(mine[::-1] if backwards else mine):
                with accumulate(model, is_last=i == 2, batch=given if backwards else None):
                    (loss_of(model, given) / n).backward()
        return whole(model)


@pytest.mark.quick(
    "dp_shard=2-None-window",
    "dp_shard=2-None-accumulate, from the last on",
    "dp_shard=2-0-accumulate",
    "dp_replicate=2-None-accumulate",
)
@pytest.mark.parametrize("way", ["window", "accumulate", "accumulate, from the last on"])
@pytest.mark.parametrize(("layout", "unit"), WHERE)
def test_a_padding_counts_as_0_whatever_its_loss_is_divided_by(ranks, layout, unit, way):
    """With the count read before the loop, an epoch's last window was 0.69 off."""
    for found in ranks.run(with_padding, 2, layout, unit, way):
        assert_equal(found, one_process(range(5)))


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


# ---- loops of accumulate -------------------------------------------------------------------------------------------------


def without_a_window(layout: str, change: str):
    """A loop with a change that windows refuse: what its first step says."""
    with init(layout, device="cpu", timeout_s=20) as world:
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
                with accumulate(model, is_last=True):
                    F.cross_entropy(model(given["x"]) * scale, given["labels"]).backward()
                optim.step()
                optim.zero_grad()
        except ShardwiseError as error:
            return type(error).__name__, error.given
        return None, ""


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
    for kind, said in ranks.run(without_a_window, 2, layout, change):
        assert (kind, said) == ("UsageError", given)


def hooked_later(layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        model, given = sharded(world, 0), batch(world.rank)
        weight = model.head.weight
        weight.register_hook(lambda grad: grad * 2)
        try:
            with accumulate(model, is_last=True):
                loss_of(model, given).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        except ShardwiseError as error:
            return type(error).__name__, error.name
        return "", ""


def test_a_hook_put_on_later_is_refused_in_accumulate(ranks):
    assert ranks.run(hooked_later, 2, "dp_shard=2") == [("UsageError", "head.weight")] * 2


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
            with accumulate(model, is_last=True):
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
        ("shared", ("UsageError", "a part of a model that was parallelized already", "1.weight")),
        ("autograd.grad", ("UnsupportedError", "torch.autograd.grad of the model's parameters", "temperature")),
        ("weight", ("UsageError", "a parameter of the model used by code outside of its forward", None)),
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
            with accumulate(model, is_last=True):
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


# ---- a weight penalty ------------------------------------------------------------------------------------------------------


def penalty_of(model: nn.Module) -> Tensor:
    """Of every parameter, on each rank. What is cut answers with the whole term."""
    terms = ((param.abs() ** 1.5).sum() for param in model.parameters())
    return 0.3 * sum(term.full_tensor() if hasattr(term, "full_tensor") else term for term in terms)


PENALTIES = ("before", "after", "with nothing else", "twice", "accumulate")


def with_penalty(layout: str, unit: int | None, when: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, unit)
        mine = [batch(i) for i in range(world.rank, 4, world.size)]
        found = []
        for _ in range(2):
            model.zero_grad()
            if when == "accumulate":
                n = count_tokens(model, mine, count=count)
                for i, given in enumerate(mine):
                    with accumulate(model, is_last=i == len(mine) - 1):
                        (loss_of(model, given) / n).backward()
                        if i == 0:
                            sw.parameter_penalty(model, penalty_of(model))
            else:
                with window(model, mine, count=count) as w:
                    if when in ("before", "twice"):
                        sw.parameter_penalty(model, penalty_of(model))
                    for given in w:
                        if when != "with nothing else":
                            (loss_of(model, given) / w.num_tokens).backward()
                    if when != "before":
                        sw.parameter_penalty(model, penalty_of(model))
            found.append(whole(model))
    return found


def penalised(when: str) -> dict[str, Tensor]:
    want = one_process([] if when == "with nothing else" else range(4), 1.0 if when == "with nothing else" else None)
    plain = build()
    for _ in range(2 if when == "twice" else 1):
        penalty_of(plain).backward()
    for name, param in plain.named_parameters():
        want[name] = param.grad if want[name] is None else want[name] + param.grad
    return want


@pytest.mark.quick(
    "dp_replicate=2-None-accumulate",
    "dp_replicate=2-None-twice",
    "dp_shard=2-0-before",
    "dp_shard=2-0-with nothing else",
    "dp_shard=2-None-after",
    "dp_shard=2-None-accumulate",
)
@pytest.mark.parametrize("when", PENALTIES)
@pytest.mark.parametrize(("layout", "unit"), [*WHERE, pytest.param(*HSDP, marks=pytest.mark.soak)])
def test_a_weight_penalty_counts_once(ranks, layout, unit, when):
    """It was summed over the replicas, and counted once for each."""
    for found in ranks.run(with_penalty, 4 if (layout, unit) == HSDP else 2, layout, unit, when):
        for grads in found:
            assert_equal(grads, penalised(when))


def after_the_loop(layout: str, unit: int | None):
    """A second loss, of the model too, behind the last micro-batch and still in the window."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, unit)
        with window(model, [batch(i) for i in range(world.rank, 4, 2)], count=count) as w:
            for given in w:
                (loss_of(model, given) / w.num_tokens).backward()
            model(batch(7 + world.rank)["x"]).pow(2).sum().backward()
        return whole(model)


@pytest.mark.parametrize(("layout", "unit"), WHERE)
def test_a_backward_behind_the_loop_belongs_to_the_window(ranks, layout, unit):
    """What it did not use counted as not used in the whole window, where a model had a parameter without dims."""
    want, plain = one_process(range(4)), build()
    for i in (7, 8):
        plain(batch(i)["x"]).pow(2).sum().backward()
    for name, param in plain.named_parameters():
        want[name] = want[name] if param.grad is None else want[name] + param.grad
    for found in ranks.run(after_the_loop, 2, layout, unit):
        assert_equal(found, want)


# What comes to parameters past all that the model has computed may be a penalty.


def as_a_matrix(model: nn.Module, given) -> Tensor:
    return (given["x"] @ model.blocks[0].weight.T).pow(2).sum()


def as_a_function(model: nn.Module, given) -> Tensor:
    """The bias has the same gradient on every rank that has as many samples."""
    return F.linear(given["x"], model.blocks[0].weight, model.blocks[0].bias).sum()


def of_a_part(model: nn.Module, given) -> Tensor:
    return model.blocks[0](given["x"]).sum()


def of_features(model: nn.Module, given) -> Tensor:
    caught: list[Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda *args: caught.append(args[2]))
    model(given["x"])
    handle.remove()
    return caught[0].pow(2).sum()


def of_input_gradients(model: nn.Module, given) -> Tensor:
    """For a linear model this has nothing of the data but how many there are."""
    x = given["x"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(model.head(x).sum(), x, create_graph=True)
    return grad.pow(2).sum()


def losses_past_the_outputs(loss, indices):
    with init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        model = sharded(world, None)
        mine = [batch(i) for i in indices[world.rank :: 2]]
        with window(model, mine, count=count) as w:
            for given in w:
                (loss(model, given) / w.num_tokens).backward()
        return whole(model)


BY_RANK, ALIKE, THE_SAME = (0, 1, 2, 3), (0, 3, 3, 0), (1, 1, 4, 4)  # samples in each: 2 + i % 3


@pytest.mark.parametrize(
    ("loss", "indices"),
    [(loss, data) for loss in (of_features, of_a_part, of_input_gradients) for data in (BY_RANK, THE_SAME)],
)
def test_a_loss_past_the_outputs_is_summed_over_replicas(ranks, loss, indices):
    plain = build()
    given = [batch(i) for i in indices]
    for each in given:
        (loss(plain, each) / sum(map(count, given))).backward()
    want = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    for found in ranks.run(losses_past_the_outputs, 2, loss, indices):
        assert_equal(found, want)


def refused_past_the_outputs(layout: str, loss, where: str):
    """What is said, and whether gradients stayed what they were."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model, given = sharded(world, None), batch(world.rank)

        def beside() -> None:
            (penalty_of(model) if loss is penalty_of else loss(model, given)).backward()

        with pytest.raises(UsageError) as caught:
            if where == "TrainStep":
                step = TrainStep(
                    model,
                    torch.optim.SGD(model.parameters(), lr=0.1),
                    loss=lambda output, given: (beside(), F.cross_entropy(output, given["labels"], reduction="sum"))[1],
                    forward=lambda m, b: m(b["x"]),
                    count=count,
                )
                step([given])
            elif where == "accumulate":
                with accumulate(model, is_last=True):
                    loss_of(model, given).backward()
                    beside()
            else:
                with window(model, [given], count=count) as w:
                    if where == "before the loop":
                        beside()
                    for each in w:
                        (loss_of(model, each) / w.num_tokens).backward()
                        if where == "in the loop":
                            beside()
                    beside()
        return str(caught.value), all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("where", ["before the loop", "in the loop", "behind the loop", "accumulate", "TrainStep"])
@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        ("dp_replicate=2", penalty_of),
        ("dp_replicate=2", as_a_matrix),
        ("dp_replicate=2", as_a_function),
        ("dp_shard=2", penalty_of),
    ],
)
def test_a_backward_past_the_outputs_is_refused(ranks, layout, loss, where):
    """A penalty would count once for each rank."""
    for text, is_left in ranks.run(refused_past_the_outputs, 2, layout, loss, where):
        assert "through nothing that the model has computed" in text and "sw.parameter_penalty(model, penalty)" in text
        assert is_left


WRONG_PENALTIES = {
    "in the loop": "within a micro-batch",
    "after the window": "outside of a window of the model",
    "in TrainStep": "within a TrainStep",
    "of the model's output": "something that the model has computed",
    "of no parameter": "a tensor that no parameter of the model goes into",
    "of many numbers": "a tensor of shape (4,)",
    "a number": "a float",
}


def wrong_penalty(what: str) -> str:
    with init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        model, given = sharded(world, None), batch(world.rank)

        def loss(output: Tensor, given) -> Tensor:
            sw.parameter_penalty(model, penalty_of(model))
            return output.sum()

        with pytest.raises(UsageError) as caught:
            if what == "in TrainStep":
                optim = torch.optim.SGD(model.parameters(), lr=0.1)
                TrainStep(model, optim, loss=loss, count=count, forward=lambda m, b: m(b["x"]))([given])
            with window(model, [given], count=count) as w:
                for each in w:
                    (loss_of(model, each) / w.num_tokens).backward()
                    if what == "in the loop":
                        sw.parameter_penalty(model, penalty_of(model))
                if what == "of the model's output":
                    sw.parameter_penalty(model, penalty_of(model) + model(given["x"]).sum())
                if what == "of no parameter":
                    sw.parameter_penalty(model, torch.ones(2, requires_grad=True).sum())
                if what == "of many numbers":
                    sw.parameter_penalty(model, model.blocks[0].weight.sum(0))
                if what == "a number":
                    sw.parameter_penalty(model, penalty_of(model).item())
            sw.parameter_penalty(model, penalty_of(model))
        return caught.value.given


@pytest.mark.parametrize("what", WRONG_PENALTIES)
def test_what_is_no_penalty_is_refused(ranks, what):
    for given in ranks.run(wrong_penalty, 2, what):
        assert WRONG_PENALTIES[what] in given


def beside_the_forward(layout: str, how: str):
    """What is said of a loss that uses a parameter which is cut, whole, beside the model's own forward."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, None)
        with pytest.raises(UnsupportedError) as caught, window(model, [batch(world.rank)], count=count) as w:
            for given in w:
                matrix = model.blocks[0].weight.full_tensor()
                loss = loss_of(model, given)
                (
                    loss / w.num_tokens + matrix.square().sum()
                    if how == "a penalty"
                    else (model(given["x"])[:, :4] @ matrix).sum()
                ).backward()
        kept = [param.grad is None for param in model.parameters()]
        with window(model, [batch(i) for i in range(world.rank, 4, 2)], count=count) as w:
            for given in w:
                (loss_of(model, given) / w.num_tokens).backward()
        return str(caught.value), kept, whole(model)


@pytest.mark.parametrize("how", ["a penalty", "data"])
@pytest.mark.parametrize("layout", ["dp_shard=2"])
def test_a_cut_parameter_beside_the_forward_is_refused(ranks, layout, how):
    """Each rank's part had the gradient of that rank's loss alone."""
    for text, kept, found in ranks.run(beside_the_forward, 2, layout, how):
        assert (
            "blocks.0.weight" in text
            and "outside the model's forward" in text
            and "sw.parameter_penalty(model, penalty)" in text
        )
        assert all(kept)
        assert_equal(found, one_process(range(4)))


def in_one_graph():
    with init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        model = sharded(world, None)
        given = batch(world.rank)
        with accumulate(model, is_last=True):
            torch.compile(lambda: loss_of(model, given), backend="aot_eager", fullgraph=True)().backward()
        model.zero_grad()
        each = torch.func.vmap(lambda x: model(x))(given["x"])
        return bool(torch.allclose(each, model(given["x"])))


@pytest.mark.soak
def test_replicas_are_compiled_and_mapped_as_they_are(ranks):
    """Hooks on what parts return, which show a loss from a penalty, break no graph."""
    assert ranks.run(in_one_graph, 2) == [True, True]


# ---- errors that are caught on the way -------------------------------------------------------------------------------------


class Breaks(Tempered):
    """Fails in its backward, in its forward, or by Ctrl-C, as `how` says."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if i == 1 and self.how == "backward":
                x = Fails.apply(x)
            if i == 1 and self.how == "interrupt":
                raise KeyboardInterrupt
        return self.head(x)


def breaking(layout: str, unit: int | None, script: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(4)
        model = parallelize(Breaks().double(), world, sharding=None if unit is None else Sharding(min_unit_bytes=unit))
        shown = [id(param) for param in model.parameters()]
        mine = [batch(i) for i in range(world.rank, 6, 2)]
        text = ""
        if script == "interrupt":
            for grad in (True, False):
                model.how = "interrupt"
                with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(grad):
                    model(mine[0]["x"])
                model.how = ""
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(2)
                    model(mine[0]["x"])
                    for param in model.parameters():
                        param.div_(2)
        elif script == "accumulate":
            n = count_tokens(model, mine, count=count)
            with pytest.raises(UsageError) as caught:
                for i, given in enumerate(mine):
                    model.how = "backward" if i == 1 else ""
                    with accumulate(model, is_last=i == 2), contextlib.suppress(MemoryError):
                        (loss_of(model, given) / n).backward()
            text = str(caught.value)
        else:
            with pytest.raises(UsageError) as caught, window(model, mine, count=count) as w:
                for i, given in enumerate(w):
                    model.how = "backward" if i == (2 if script == "the last" else 1) else ""
                    with contextlib.suppress(MemoryError):
                        (loss_of(model, given) / w.num_tokens).backward()
            text = str(caught.value)
        model.how = ""
        assert [id(param) for param in model.parameters()] == shown
        model.zero_grad()
        with window(model, mine, count=count) as w:
            for given in w:
                (loss_of(model, given) / w.num_tokens).backward()
        return text, whole(model)


@pytest.mark.quick("None-in between", "None-accumulate", "0-the last", "0-interrupt")
@pytest.mark.parametrize("script", ["in between", "the last", "accumulate", "interrupt"])
@pytest.mark.parametrize("unit", [None, 0])
def test_what_was_caught_on_the_way(ranks, unit, script):
    """Gradients of earlier micro-batches were dropped, 0.5 to 0.67 off, without a word; and a forward that Ctrl-C had ended stayed
    open, so that the next one computed with the values of before."""
    for text, found in ranks.run(breaking, 2, "dp_shard=2", unit, script):
        assert script == "interrupt" or ("a backward that raised an error" in text and "on every rank" in text)
        assert_equal(found, one_process(range(6)))


def stepping_inside(layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, None)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError) as caught, window(model, [batch(world.rank)], count=count) as w:
            for given in w:
                (loss_of(model, given) / w.num_tokens).backward()
            optim.step()
        with pytest.raises(UsageError, match="entered twice"):
            with window(model, [batch(world.rank)], count=count) as w:
                for given in w:
                    (loss_of(model, given) / w.num_tokens).backward()
            with w:
                pass
        return str(caught.value)


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_step_inside_a_window_is_refused(ranks, layout):
    assert all(
        "inside a window" in text and "after the with block" in text for text in ranks.run(stepping_inside, 2, layout)
    )


def penalty_on_padding(layout: str):
    """Two micro-batches over three ranks: the third runs a padding, and the penalty once like the others."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world, None)
        given = MicroBatch(batch(world.rank % 2), index=world.rank)
        given.padding = world.rank == 2
        with window(model, [given], count=count) as w:
            for each in w:
                (loss_of(model, each) / w.num_tokens).backward()
            sw.parameter_penalty(model, penalty_of(model))
        return whole(model)


@pytest.mark.parametrize("layout", ["dp_shard=3", "dp_replicate=3"])
def test_a_weight_penalty_beside_a_padding_counts_once(ranks, layout):
    want, plain = one_process(range(2)), build()
    penalty_of(plain).backward()
    for name, param in plain.named_parameters():
        want[name] = want[name] + param.grad
    for found in ranks.run(penalty_on_padding, 3, layout):
        assert_equal(found, want)


def gathered_by_one_rank():
    with init("dp_shard=2", device="cpu", timeout_s=20) as world:
        model = sharded(world, 0)
        for _ in range(2):
            model.zero_grad()
            with sw.gathered(model):
                for _ in range(1 + 2 * world.rank):  # with gradients, that nobody asks for
                    model(batch(0)["x"])
            with window(model, [batch(i) for i in range(world.rank, 4, 2)], count=count) as w:
                for given in w:
                    (loss_of(model, given) / w.num_tokens).backward()
        return whole(model)


def test_forwards_within_gathered_count_for_no_backward(ranks):
    for found in ranks.run(gathered_by_one_rank, 2):
        assert_equal(found, one_process(range(4)))
