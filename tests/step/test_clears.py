"""Gradients that a loop clears within its window, in every way there is: as its first line, and after a backward."""

import contextlib

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
    with pytest.raises(RankError, match="a gradient that was replaced within a window"):
        ranks.run(by_hand, 2, "dp_replicate=2", "without")
