"""Gradients that a loop clears within its window, in every way there is: as its first line, and after a backward."""

import contextlib

import pytest
import torch
from step.plain import batch, build, sum_loss
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError


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
