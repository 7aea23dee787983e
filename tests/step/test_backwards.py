"""Backwards outside of windows are refused before they run, on several ranks; in the window of one model the others of a loss are summed too."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from models.tempered import Tempered, batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.data.batch import MicroBatch

RANKS = {"dp_replicate=2": 2, "dp_shard=2": 2, "dp_replicate=2,dp_shard=2": 4, "tp=2": 2, "dp_shard=2,tp=2": 4}


class Pair(nn.Module):
    """Two layers that tp cuts, a norm and a number that it does not."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        if counts:
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and torch.is_grad_enabled():
            self.seen += len(x)
        y = self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
        self.aux = y.square().mean()
        return x + y


def pair(seed: int = 0, *, counts: bool = False) -> Pair:
    torch.manual_seed(seed)
    return Pair(counts).double()


def x_of(index: int) -> Tensor:
    return batch(index)["x"]


def count(given: dict[str, Tensor]) -> int:
    return len(given["x"])


def whole(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else sw.full_tensor(p.grad).detach() for n, p in model.named_parameters()}


def plain_grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def assert_equal(found: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    for name, grad in want.items():
        ours = found[name]
        assert (ours is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(
                ours, grad, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
            )


# ---- outside of windows ----------------------------------------------------------------------------------------------


def by_a_checkpoint(model: nn.Module, x: Tensor) -> None:
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).sum().backward()


def by_an_attribute(model: nn.Module, x: Tensor) -> None:
    model(x)
    model.aux.backward()


def by_names(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward(inputs=[*model.parameters()])


def by_edges(model: nn.Module, x: Tensor) -> None:
    loss = model(x).sum()
    loss.backward(inputs=[torch.autograd.graph.get_gradient_edge(model.scale)])


def through_more(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    torch.autograd.backward([F.relu(model(x)).sum(), model(x).mean()])


def of_its_gradients(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(model(x).sum(), [*model.parameters()], allow_unused=True)


def a_penalty(model: nn.Module, _x: Tensor) -> None:
    (model.scale.square() + model.norm.weight.sum()).backward()


def from_before_a_window(model: nn.Module, x: Tensor) -> None:
    with sw.window(model, [{"x": x}], count=count) as w:
        for given in w:
            loss = model(given["x"]).sum()
            (model(given["x"]).sum() * 0).backward()
    model.zero_grad()
    loss.backward()


def in_an_evaluation(model: nn.Module, x: Tensor) -> None:
    model.eval()
    model(x).sum().backward()


WAYS = {
    "a loss": lambda model, x: model(x).sum().backward(),
    **{
        way.__name__.replace("_", " "): way
        for way in (
            by_a_checkpoint,
            by_an_attribute,
            by_names,
            by_edges,
            through_more,
            of_its_gradients,
            a_penalty,
            from_before_a_window,
            in_an_evaluation,
        )
    },
}


def outside(layout: str, name: str):
    """What is said, the gradients after it, and those of a window that follows."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(pair(), world, example={"x": x_of(0)})
        x = x_of(world.axis("dp").rank)
        try:
            WAYS[name](model, x)
            said = "nothing"
        except (sw.UsageError, sw.UnsupportedError) as error:
            said = error.given
        model.train()
        after = [param.grad is None for param in model.parameters()]
        model.zero_grad()
        with sw.window(model, [{"x": x}], count=count) as w:
            for given in w:
                (model(given["x"]).square().sum() / w.num_tokens).backward()
        return said, after, whole(model)


def squared(num_ranks: int) -> dict[str, Tensor | None]:
    plain = pair()
    for i in range(num_ranks):
        (plain(x_of(i)).square().sum() / sum(len(x_of(i)) for i in range(num_ranks))).backward()
    return plain_grads(plain)


@pytest.mark.combinations("pairs")
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2", "tp=2"])
def test_outside_of_a_window_it_is_refused_and_changes_nothing(ranks, layout, name):
    """It summed over the ranks what is no sum, and under tp each rank's part was taken for the whole."""
    num_data = 1 if layout == "tp=2" else 2
    for said, after, found in ranks.run(outside, RANKS[layout], layout, name):
        by_name = ("torch.autograd.grad of the model's parameters", "backward of a parameter that is cut over tp")
        assert "outside of a window" in said or (name in ("of its gradients", "by names") and said.startswith(by_name))
        assert (
            all(after) or name == "by a checkpoint"
        )  # it begins in a backward, which no graph shows: refused at the end
        assert_equal(found, squared(num_data))


def inputs_alone(layout: str):
    """Gradients of what a model is given need no window, and those of parameters stay what they were."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(pair(), world, example={"x": x_of(0)})
        for _ in range(2):
            x = x_of(world.axis("dp").rank).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).square().sum(), [x])
        return grad, [param.grad is None for param in model.parameters()]


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2", "tp=2"])
def test_gradients_of_inputs_need_no_window(ranks, layout):
    for rank, (found, are_none) in enumerate(ranks.run(inputs_alone, RANKS[layout], layout)):
        x = x_of(0 if layout == "tp=2" else rank).requires_grad_()
        (want,) = torch.autograd.grad(pair()(x).square().sum(), [x])
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)
        assert all(are_none)


def alone(parallel: dict):
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(pair(), world, **parallel)
        for i in range(2):
            model(x_of(i)).square().sum().backward()
        model.up.weight.square().sum().backward()
        return whole(model)


@pytest.mark.parametrize("parallel", [{}, {"sharding": sw.Sharding(engine="fsdp2")}], ids=["replica", "fsdp2"])
def test_on_one_rank_a_plain_backward_is_that_of_torch(ranks, parallel):
    plain = pair()
    for i in range(2):
        plain(x_of(i)).square().sum().backward()
    plain.up.weight.square().sum().backward()
    assert_equal(ranks.run(alone, 1, parallel)[0], plain_grads(plain))


# ---- several models in one loss ----------------------------------------------------------------------------------------

PARTS = (
    "both",
    "on one rank",
    "in one micro-batch",
    "before, too",
    "in accumulate",
    "in a step",
    "nested",
    "its window within",
    "in turn",
)


def loss_of(first: nn.Module, second: nn.Module, x: Tensor, *, with_second: bool) -> Tensor:
    y = first(x)
    return (second(y) if with_second else y).square().sum()


def uses_second(part: str, rank: int, i: int) -> bool:
    return {"on one rank": rank == 0, "in one micro-batch": i == 0}.get(part, True)


def two_models(layout: str, part: str):
    """Gradients of two models of one loss, where the second has no window of its own; and its count of what it has seen."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        given = {"sharding": sw.Sharding(buffers={"seen": "sum"}), "example": {"x": x_of(0)}}
        first, second = (sw.parallelize(pair(seed, counts=True), world, **given) for seed in (0, 1))
        third = sw.parallelize(pair(2, counts=True), world, **given)  # in use, and in no loss
        dp = world.axis("dp")
        mine = [{"x": x_of(i)} for i in range(dp.rank, 2 * dp.size, dp.size)]
        if part == "before, too":
            with sw.window(second, mine, count=count) as w:
                for given in w:
                    second(given["x"]).square().sum().backward()
                assert w.num_tokens
        if part == "in turn":
            for i, given in enumerate(mine):
                for model in (first, second):
                    with sw.accumulate(model, is_last=i == 1):
                        loss_of(first, second, given["x"], with_second=True).backward()
        elif part == "in accumulate":
            for i, given in enumerate(mine):
                with sw.accumulate(first, is_last=i == 1):
                    loss_of(first, second, given["x"], with_second=True).backward()
        elif part == "in a step":
            step = sw.TrainStep(
                first,
                torch.optim.SGD(first.parameters(), lr=0.0),
                forward=lambda model, given: loss_of(model, second, given["x"], with_second=True),
                loss=lambda output, given: output * 1.0,
                count=lambda given: 1,
            )
            step(mine)
        else:
            with contextlib.ExitStack() as stack:
                w = stack.enter_context(sw.window(first, mine, count=count))
                if part == "nested":
                    stack.enter_context(sw.accumulate(second, is_last=True))
                for i, given in enumerate(w):
                    uses = uses_second(part, dp.rank, i)
                    loss_of(first, second, given["x"], with_second=uses).backward()
                    if part == "its window within":
                        with sw.window(second, [given], count=count) as inner:
                            for each in inner:
                                second(each["x"]).square().sum().backward()
                            assert inner.num_tokens
                assert w.num_tokens
        return whole(first), whole(second), float(second.seen), whole(third)


def two_alone(part: str, size: int):
    first, second = pair(0, counts=True), pair(1, counts=True)
    if part == "before, too":
        for i in range(2 * size):
            second(x_of(i)).square().sum().backward()
    for i in range(2 * size):
        if part == "in turn":
            loss_of(first, second, x_of(i), with_second=True).backward()
        if part == "its window within":
            second(x_of(i)).square().sum().backward()
        loss = loss_of(first, second, x_of(i), with_second=uses_second(part, i % size, i // size))
        (loss / (2 * size if part == "in a step" else 1)).backward()
    return plain_grads(first), plain_grads(second), float(second.seen)


@pytest.mark.quick(
    "dp_replicate=2-in accumulate",
    "dp_replicate=2-nested",
    "dp_replicate=2-its window within",
    "dp_shard=2-in one micro-batch",
    "dp_shard=2-before, too",
    "dp_shard=2-in a step",
    "tp=2-both",
    "tp=2-nested",
)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "layout", [*("dp_replicate=2", "dp_shard=2", "tp=2"), pytest.param("dp_shard=2,tp=2", marks=pytest.mark.soak)]
)
def test_the_other_models_of_a_loss_are_summed(ranks, layout, part):
    size = 1 if layout == "tp=2" else 2
    if part == "on one rank" and layout != "dp_replicate=2":
        return  # a forward of a cut model is one of all ranks
    want = two_alone(part, size)
    for first, second, seen, third in ranks.run(two_models, RANKS[layout], layout, part):
        if part != "in a step":
            assert_equal(first, want[0])
        assert_equal(second, want[1])
        assert all(grad is None for grad in third.values())
        assert seen == want[2] or part == "in a step"  # which runs the model more than once, to try its loss


def wrong_with_two(what: str) -> str:
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        first, second = (sw.parallelize(pair(seed), world) for seed in (0, 1))
        optim, given = torch.optim.SGD(second.parameters(), lr=0.1), {"x": x_of(world.rank)}
        with pytest.raises(sw.UsageError) as caught, sw.window(first, [given], count=count) as w:
            for each in w:
                if what == "made in it":
                    second = sw.parallelize(pair(1), world)
                loss_of(first, second, each["x"], with_second=True).backward()
                if what == "accumulate":
                    with sw.accumulate(first, is_last=True):
                        pass
                if what == "cleared":
                    optim.zero_grad()
                if what == "clipped":
                    sw.clip_grad_norm_(second, 1.0)
                optim.step()
        assert all(param.grad is None for model in (first, second) for param in model.parameters())
        return caught.value.given


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("stepped", "SGD.step() inside a window of another model"),
        ("clipped", "clip_grad_norm_ inside a window of another model"),
        ("cleared", "zero_grad() inside a window, after a backward"),
        ("made in it", "a backward of a sharded model outside of a window"),
        ("accumulate", "sw.accumulate inside a window of the same model"),
    ],
)
def test_the_other_model_waits_for_the_end_of_the_window(ranks, what, said):
    assert ranks.run(wrong_with_two, 2, what) == [said] * 2


def test_two_worlds_have_nothing_to_do_with_each_other(ranks):
    """A model that is still there, of a world that is closed."""
    assert ranks.run(after_another_world, 2) == [True] * 2


def after_another_world() -> bool:
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        kept = sw.parallelize(pair(), world, example={"x": x_of(0)})
    with sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        model = sw.parallelize(Tempered().double(), world)
        with sw.window(model, [batch(world.rank)], count=count) as w:
            for given in w:
                (model(given["x"]).sum() / w.num_tokens).backward()
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        return kept.scale.grad is None


def odd_loops(what: str):
    """Gradients of both models, or what is said."""
    with sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        first, second = (sw.parallelize(pair(seed), world) for seed in (0, 1))
        mine = [MicroBatch({"x": x_of(world.rank)}, index=world.rank)]
        mine.append(MicroBatch({"x": x_of(2)}, index=2 + world.rank, padding=world.rank == 1))
        try:
            if what == "a penalty beside a padding":
                for i, given in enumerate(mine):
                    with sw.accumulate(first, is_last=i == 1, batch=given):
                        loss_of(first, second, given["x"], with_second=False).backward()
                        if i == 1:
                            sw.parameter_penalty(first, first.up.weight.square().sum())
            else:
                with sw.window(first, mine, count=count) as w:
                    for given in w:
                        loss_of(first, second, given["x"], with_second=True).backward()
                        if what == "a graph by hand":
                            loss = first(given["x"]).square().sum() * (not given.padding)
                            (grad,) = torch.autograd.grad(loss, [first.scale], create_graph=True)
                            first.scale.grad = first.scale.grad + grad
                    assert w.num_tokens
                    if what == "a penalty of another model":
                        sw.parameter_penalty(second, second.up.weight.square().sum())
                    if what == "a penalty between two":
                        sw.parameter_penalty(first, (first.up.weight - second.up.weight).square().sum())
                    if what == "a penalty on one rank" and world.rank == 0:
                        sw.parameter_penalty(first, first.up.weight.square().sum())
                    if what == "a compiled penalty":
                        compiled = torch.compile(lambda x: x.square().sum(), backend="aot_eager")
                        compiled(first.up.weight).backward()
                    if what == "a step of the second":
                        optim = torch.optim.SGD(second.parameters(), lr=0.1)
                        sw.TrainStep(second, optim, loss=lambda y, _: y.sum(), count=count)(mine)
                    if what == "one that was changed":
                        second.add_module("later", nn.Linear(4, 4).double())
        except sw.ShardwiseError as error:
            return error.given
        return whole(first), whole(second)


def odd_alone(what: str):
    first, second = pair(0), pair(1)
    for i in range(3):
        loss_of(first, second, x_of(i), with_second=what != "a penalty beside a padding").backward()
        if what == "a graph by hand":
            (grad,) = torch.autograd.grad(first(x_of(i)).square().sum(), [first.scale])
            first.scale.grad = first.scale.grad + grad
    for model, name in ((first, "a penalty beside a padding"), (second, "a penalty of another model")):
        if what == name:
            model.up.weight.square().sum().backward()
    return plain_grads(first), plain_grads(second)


@pytest.mark.parametrize(
    "what", ["a padding", "a penalty beside a padding", "a graph by hand", "a penalty of another model"]
)
def test_odd_loops_have_the_gradients_of_one_process(ranks, what):
    want = odd_alone(what)
    for found in ranks.run(odd_loops, 2, what):
        assert not isinstance(found, str), found
        assert_equal(found[0], want[0])
        assert_equal(found[1], want[1])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a penalty between two", "parameter_penalty with another tensor that is trained, of shape (8, 4)"),
        ("a penalty on one rank", "calls of sw.parameter_penalty on this rank"),
        (
            "a compiled penalty",
            "a backward in a window that comes to a parameter through nothing that the model has computed",
        ),
        ("a step of the second", "gradients that were there before the step"),
        ("one that was changed", "the module changed after it was sharded: a Linear was added or replaced"),
    ],
)
def test_odd_loops_are_refused(ranks, what, said):
    for found in ranks.run(odd_loops, 2, what):
        assert isinstance(found, str) and said in found, found


def through_a_frozen_model(layout: str):
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(pair().requires_grad_(False), world, example={"x": x_of(0)})
        x = x_of(0).requires_grad_()
        model(x).square().sum().backward(create_graph=True)
        return x.grad.detach()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("layout", ["dp_replicate=2", "tp=2"])
def test_a_graph_of_a_backward_through_a_frozen_model_needs_no_window(ranks, layout):
    x = x_of(0).requires_grad_()
    pair()(x).square().sum().backward()
    for found in ranks.run(through_a_frozen_model, 2, layout):
        torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-14)
