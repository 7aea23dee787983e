"""A parameter that some windows do not use: it has no gradient there, and the optimizer leaves it alone."""

import contextlib

import pytest
import torch
from step.plain import assert_close, gradients, values
from torch import nn

import shardwise as sw


class Second(nn.Module):
    """Two layers in one unit, of which the second takes part in some windows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, takes_part):
        return self.first(x) + self.second(x) if takes_part else self.first(x)


def trained_with_decay(layout, own_loop):
    """The second layer's weight after each of four windows, and whether it had a gradient."""
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(0)
        model = sw.parallelize(Second().double(), world)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        call = {"count": lambda b: len(b["x"]), "forward": lambda m, b: m(b["x"], bool(b["takes_part"]))}
        step = sw.TrainStep(model, optim, loss=lambda output, batch: output.sum(), **call)
        found = []
        for takes_part in (1, 0, 1, 0):
            batch = {"x": torch.ones(2, 4, dtype=torch.float64), "takes_part": torch.tensor(takes_part)}
            had = None
            if own_loop:
                with sw.window(model, [batch], count=call["count"]) as window:
                    for part in window:
                        (model(part["x"], bool(takes_part)).sum() / window.num_tokens).backward()
                had = model.second.weight.grad is not None
                optim.step()
                optim.zero_grad()
            else:
                step([batch])
            found.append((had, values(model)["second.weight"]))
        return found


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_window_without_a_parameter_leaves_it_alone_though_the_one_before_had_it(ranks, layout, own_loop):
    """A gradient of zeros in place of none would move it: weight decay, and the momentum of AdamW."""
    torch.manual_seed(0)
    plain = Second().double()
    optim, wanted = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5), []
    for takes_part in (1, 0, 1, 0):
        (plain(torch.ones(2, 4, dtype=torch.float64), bool(takes_part)).sum() / 2).backward()
        optim.step()
        optim.zero_grad()
        wanted.append(plain.second.weight.detach().clone())
    for found in ranks.run(trained_with_decay, 2, layout, own_loop):
        assert [had for had, _ in found] == ([True, False, True, False] if own_loop else [None] * 4)
        for (_, weight), want in zip(found, wanted, strict=True):
            torch.testing.assert_close(weight, want, rtol=1e-12, atol=1e-14)


def gradients_of_one_rank(layout):
    """Gradients of a window in which rank 1 leaves the second layer out."""
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(0)
        model = sw.parallelize(Second().double(), world)
        batch = {"x": torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)}
        with sw.window(model, [batch], count=lambda b: len(b["x"])) as window:
            for part in window:
                (model(part["x"], world.rank == 0).square().sum() / window.num_tokens).backward()
        return gradients(model)


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_parameter_that_one_rank_does_not_use_has_the_gradient_of_the_other(ranks, layout):
    torch.manual_seed(0)
    plain = Second().double()
    for rank in range(2):
        x = torch.full((2, 4), 1.0 + rank, dtype=torch.float64)
        (plain(x, rank == 0).square().sum() / 4).backward()
    for found in ranks.run(gradients_of_one_rank, 2, layout):
        assert_close(found, {name: param.grad for name, param in plain.named_parameters()})


class Holder(nn.Module):
    """A model with its layers one level down."""

    def __init__(self):
        super().__init__()
        self.inner = Second()

    def forward(self, x):
        return self.inner(x, True)


def interrupt(_module, _args):
    raise KeyboardInterrupt


def gradients_of_a_part(layout, raises):
    """Of an inner layer called by itself, on data that is the same on all ranks, after a forward of the model; ``raises``:
    how that one ended."""
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(0)
        model = sw.parallelize(Holder().double(), world)
        x = torch.ones(2, 4, dtype=torch.float64)

        def run() -> None:
            stop = model.inner.first.register_forward_pre_hook(interrupt) if raises == "is interrupted" else None
            with contextlib.suppress(RuntimeError, KeyboardInterrupt):
                model(torch.ones(2, 3, dtype=torch.float64) if raises == "raises" else x)
            if stop is not None:
                stop.remove()

        run()
        with sw.window(model, [{"x": x}], count=lambda b: len(b["x"])) as window:
            for part in window:
                if raises != "is interrupted":  # torch calls no hook of its end then
                    run()
                (model.inner.second(part["x"]).square().sum() / window.num_tokens).backward()
        return gradients(model)


@pytest.mark.parametrize("raises", ["", "raises", "is interrupted"])
def test_a_part_that_is_called_by_itself_after_a_forward_is_trained_on_every_ranks_data(ranks, raises):
    """And is not taken for a weight penalty, which is the same on all ranks and counts once."""
    torch.manual_seed(0)
    plain = Holder().double()
    for _ in range(2):
        (plain.inner.second(torch.ones(2, 4, dtype=torch.float64)).square().sum() / 4).backward()
    for found in ranks.run(gradients_of_a_part, 2, "dp_replicate=2", raises):
        assert found["inner.first.weight"] is None
        assert_close(found, {name: param.grad for name, param in plain.named_parameters()})
