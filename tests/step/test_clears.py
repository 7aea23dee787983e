"""Gradients that a loop clears within its window, in every way there is: as its first line, and after a backward."""

import contextlib
import warnings

import pytest
import torch
from step.plain import batch, build, sum_loss
from torch import nn

import shardwise as sw
from shardwise.errors import RankError, UsageError


def set_to_none(model, _optim):
    for param in model.parameters():
        param.grad = None


def deleted(_model, optim):
    for param in optim.param_groups[0]["params"]:
        del param.grad


def zeroed(model, _optim):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


def replaced(model, _optim):
    for param in model.parameters():
        if param.grad is not None:
            param.grad = torch.zeros_like(param.grad)


BY_METHOD = {
    "optim.zero_grad()": lambda model, optim: optim.zero_grad(),
    "optim.zero_grad(False)": lambda model, optim: optim.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optim: model.zero_grad(),
    "model.zero_grad(False)": lambda model, optim: model.zero_grad(set_to_none=False),
}
BY_HAND = {"None": set_to_none, "del": deleted, "zero_": zeroed, "zeros": replaced}
CLEARS = BY_METHOD | BY_HAND
PLAIN = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad


def norms(layout, clears, where):
    """The norm of three windows, or the error: equal ones where each begins without gradients."""
    with sw.init(layout, device="cpu") as world:
        found = {}
        for name in clears:
            model = sw.parallelize(build(), world, example=batch(0))
            optim, data = torch.optim.SGD(model.parameters(), lr=0.0), world.axis("dp")
            found[name] = seen = []
            for _ in range(3):
                with (
                    contextlib.suppress(UsageError),
                    sw.window(model, [batch(i) for i in range(data.rank, 4, data.size)]) as w,
                ):
                    if where == "first line":
                        CLEARS[name](model, optim)
                    for i, given in enumerate(w):
                        if (i, where) == (0, "in the loop"):
                            CLEARS[name](model, optim)
                        (sum_loss(model(given["input_ids"]), given) / w.num_tokens).backward()
                        if where == "after a backward":
                            CLEARS[name](model, optim)
                seen.append(float(sw.clip_grad_norm_(model, 1e9)))
                optim.step()
            assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == PLAIN
        return found


@pytest.mark.quick("dp_replicate=2-first line", "dp_shard=2-in the loop", "tp=2-first line")
@pytest.mark.parametrize("where", ["first line", "in the loop"])
@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_replicate=2", "dp_shard=2", "tp=2"])
def test_gradients_from_before_are_cleared_however_a_loop_does_it(ranks, layout, where):
    """Put aside when the window began, they were added back: three windows gave 1, 2 and 3 times the norm."""
    found = ranks.run(norms, 1 if layout == "dp_shard=1" else 2, layout, list(CLEARS), where)[0]
    for name, (first, *others) in found.items():
        assert others == pytest.approx([first, first], rel=1e-12), name


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_zero_grad_after_a_backward_is_refused_and_nothing_is_left_of_the_window(ranks, layout):
    found = ranks.run(norms, 2, layout, list(BY_METHOD), "after a backward")[0]
    assert set(map(tuple, found.values())) == {(0.0, 0.0, 0.0)}


def rounds():
    """Whether torch's own ``zero_grad`` is in place: before, within and after micro-batches of ``accumulate``, and after an error."""
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build(), world)
        told = [(torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == PLAIN]
        for is_last in (False, True):
            with sw.accumulate(model, is_last=is_last):
                sum_loss(model(batch(0)["input_ids"]), batch(0)).backward()
            told.append((torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == PLAIN)
        with contextlib.suppress(ZeroDivisionError), sw.accumulate(model, is_last=False):
            raise ZeroDivisionError
        with contextlib.suppress(ZeroDivisionError), sw.window(model, [batch(0)]):
            raise ZeroDivisionError
        return [*told, (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == PLAIN]


def test_torchs_own_methods_are_in_place_outside_of_windows(ranks):
    assert ranks.run(rounds, 2)[0] == [True, False, True, True]


def by_hand(layout, adds):
    """Two windows whose gradients a loop assigns itself, the second on top of the first's: the sum of both, or the error."""
    with sw.init(layout, device="cpu") as world:
        model, data = sw.parallelize(build(), world), world.axis("dp")
        params = list(model.parameters())
        for _ in range(2):
            with sw.window(model, [batch(i) for i in range(data.rank, 2, data.size)]) as w:
                for given in w:
                    if adds == "after a gradient":
                        found = torch.autograd.grad(sum_loss(model(given["input_ids"]), given) / w.num_tokens, params)
                    else:
                        found = [torch.ones_like(param) for param in params]
                    for param, grad in zip(params, found, strict=True):
                        param.grad = grad if param.grad is None else param.grad + grad
        return float(torch.stack([param.grad.norm() for param in params]).norm())


def test_gradients_that_a_loop_assigns_are_added_to_those_from_before_or_refused(ranks):
    one = ranks.run(by_hand, 1, "dp_shard=1", "after a gradient")[0]
    assert ranks.run(by_hand, 2, "dp_replicate=2", "after a gradient") == [pytest.approx(one, rel=1e-12)] * 2
    with pytest.raises(RankError, match="a gradient that was written within a window by hand"):
        ranks.run(by_hand, 2, "dp_replicate=2", "without")


class Normed(nn.Module):
    """A norm over heads that tp cuts: each rank has a part of its gradient."""

    def __init__(self):
        super().__init__()
        self.embed, self.q, self.o = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.norm = nn.LayerNorm(4)

    def forward(self, input_ids):
        x = self.norm(self.q(self.embed(input_ids)).unflatten(-1, (2, 4)))
        return self.o(torch.tanh(x).flatten(-2))


def kept(layout, clears, skips):
    """Gradients after two windows without a clear between them but ``clears``; ``skips``: the ranks without a backward in the second."""
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(3)
        model, data = sw.parallelize(Normed().double(), world, example=batch(0)), world.axis("dp")
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        for number in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a window without a backward
                with sw.window(model, [batch(i) for i in range(data.rank, 2, data.size)]) as w:
                    if number and clears == "in":
                        optim.zero_grad()
                    for given in w:
                        out = model(given["input_ids"])
                        if not (number and (skips == "all" or world.rank == 1)):
                            (sum_loss(out, given) / w.num_tokens).backward()
            if not number and clears == "zeros":
                optim.zero_grad(set_to_none=False)
        return {name: None if p.grad is None else sw.full_tensor(p.grad) for name, p in model.named_parameters()}


def in_one_process(clears, skips):
    torch.manual_seed(3)
    plain, batches = Normed().double(), [batch(0), batch(1)]
    total = sum(int((given["labels"] != -100).sum()) for given in batches)
    of = [
        torch.autograd.grad(sum_loss(plain(given["input_ids"]), given) / total, [*plain.parameters()])
        for given in batches
    ]
    names = [name for name, _ in plain.named_parameters()]
    windows = [of if clears == "no" else [], of[:1] if skips == "rank 1" else []]
    grads = [each for window in windows for each in window]
    return {name: sum(grad[i] for grad in grads) for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("layout", "clears", "skips"),
    [
        ("dp_replicate=2", "no", "all"),
        ("dp_shard=2", "no", "all"),
        ("tp=2", "no", "all"),
        *(("dp_replicate=2", clears, "rank 1") for clears in ("no", "in", "zeros")),  # others run as many backwards
    ],
)
def test_gradients_from_before_are_kept_or_cleared_where_ranks_run_no_backward(ranks, layout, clears, skips):
    """Summed again with those of the window, parts along tp were doubled, and replicas refused what nobody had written."""
    wanted = in_one_process(clears, skips)
    for found in ranks.run(kept, 2, layout, clears, skips):
        for name, grad in wanted.items():
            assert torch.allclose(found[name], grad, rtol=1e-12, atol=1e-14), name


def written_by_hand(layout, how):
    """What a window ends in that writes its own numbers into gradients from before it, which were cleared to zero or not."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(build(), world)
        optim, params = torch.optim.SGD(model.parameters(), lr=0.0), [*model.parameters()]
        for number in range(2):
            with sw.window(model, [batch(world.rank)]) as w:
                if number and "clears in" in how:
                    optim.zero_grad(set_to_none="to None" in how)
                for given in w:
                    if number and "adds" in how:
                        for param in params:
                            param.grad.add_(1.0 + world.rank)
                    elif number and "assigns" in how:
                        for param in params:
                            param.grad = torch.full_like(param, 1.0 + world.rank)
                    (sum_loss(model(given["input_ids"]), given) / w.num_tokens).backward()
            if not number and "clears before" in how:
                optim.zero_grad(set_to_none=False)
        return sum(float(param.grad.sum()) for param in params)


@pytest.mark.parametrize(
    ("how", "is_right"),
    [
        ("assigns, clears in, to None", True),
        ("assigns, clears in", True),
        ("assigns, clears before", True),
        ("adds, clears in", True),
        ("assigns", False),
        ("adds", False),
        ("adds, clears before", False),
    ],
)
def test_what_a_loop_writes_into_gradients_is_summed_or_refused(ranks, how, is_right):
    """Taken for a sum over the ranks, it was another one on each, and replicas drifted apart."""
    if is_right:
        one, other = ranks.run(written_by_hand, 2, "dp_replicate=2", how)
        none, _ = ranks.run(written_by_hand, 2, "dp_replicate=2", "clears in, of nothing")
        numel = sum(param.numel() for param in build().parameters())
        assert one == other == pytest.approx(none + 3.0 * numel, rel=1e-12)  # 1 of the first rank and 2 of the second
    else:
        with pytest.raises(RankError, match="a gradient that was written within a window by hand"):
            ranks.run(written_by_hand, 2, "dp_replicate=2", how)


WAYS_THROUGH = ("inputs", "frozen", "accumulate", "bare")


def through(layout, way):
    """The gradients of a plain generator that is trained through a sharded model, and whether that has any; or what is said."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(build(), world)
        torch.manual_seed(0)
        generator = nn.Linear(2, 2).double()
        noise = torch.ones(1, 2, dtype=torch.float64)
        model.requires_grad_(way != "frozen")
        try:
            for _ in range(2):
                generator.zero_grad()
                with sw.accumulate(model, is_last=True) if way == "accumulate" else contextlib.nullcontext():
                    loss = generator(noise).sum() * model(batch(world.rank)["input_ids"]).mean()
                    loss.backward(inputs=[*generator.parameters()] if way == "inputs" else None)
        except sw.UsageError as error:
            return error.given
        model.requires_grad_(True)
        return generator.weight.grad, any(param.grad is not None for param in model.parameters())


def one_way_through(rank):
    plain = build()
    torch.manual_seed(0)
    generator = nn.Linear(2, 2).double()
    (generator(torch.ones(1, 2, dtype=torch.float64)).sum() * plain(batch(rank)["input_ids"]).mean()).backward()
    return generator.weight.grad


@pytest.mark.parametrize("way", WAYS_THROUGH)
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_a_plain_model_that_is_trained_through_a_sharded_one(ranks, layout, way):
    """Where gradients of the sharded one are not asked for, no window is needed."""
    for rank, found in enumerate(ranks.run(through, 2, layout, way)):
        if way == "bare":
            assert found == "a backward of a sharded model outside of a window"
        else:
            torch.testing.assert_close(found[0], one_way_through(rank), rtol=1e-12, atol=1e-14)
            assert found[1] == (way == "accumulate")
