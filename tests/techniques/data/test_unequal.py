"""Ranks that run another number of forwards, or units in an order of their own: told within seconds, and not a hang."""

import time

import pytest
import torch
from torch import nn

from shardwise import Sharding
from shardwise.errors import RankError
from shardwise.parallel import parallelize
from shardwise.state import gathered
from shardwise.step.own_loop import accumulate
from shardwise.step.window import window
from shardwise.world import init


def forwards(numbers: tuple[int, int], whole: bool) -> bool:
    """As many no-grad forwards as this rank is given, then a call that all ranks make."""
    with init("dp_shard=2", device="cpu", timeout_s=100) as world:
        layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        model = parallelize(layers, world, sharding=Sharding(min_unit_bytes=0))
        with torch.no_grad():
            if whole:
                with gathered(model):
                    for _ in range(numbers[world.rank]):
                        model(torch.ones(1, 8))
            else:
                for _ in range(numbers[world.rank]):
                    model(torch.ones(1, 8))
        world.barrier()
        return bool(model(torch.ones(1, 8)).isfinite().all())


@pytest.mark.parametrize("numbers", [(2, 3), pytest.param((3, 2), marks=pytest.mark.soak)])
def test_a_rank_with_a_forward_more_is_told_so(ranks, numbers):
    """Its gather hung until the timeout, or met another collective: gloo ended the process by SIGABRT."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(forwards, 2, numbers, False, timeout_s=60)
    assert "wait for each other in different collectives" in str(caught.value) and "waits at a barrier" in str(
        caught.value
    )
    assert time.monotonic() - start < 50  # of a timeout of 100


def test_within_gathered_ranks_run_as_many_forwards_as_they_like(ranks):
    assert ranks.run(forwards, 2, (2, 5), True) == [True, True]


class Chosen(nn.Module):
    """Experts called in an order that the data decide."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, order):
        for number in order:
            x = torch.tanh(self.experts[number](x))
        return x


def ordered(orders: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """For each step the order of every rank; gradients of a block after each."""
    with init("dp_shard=2", device="cpu", timeout_s=100) as world:
        torch.manual_seed(0)
        model = parallelize(Chosen().double(), world, sharding=Sharding(min_unit_bytes=0))
        found = []
        for order in orders:
            with accumulate(model, is_last=True):
                model(x_of(world.rank), order[world.rank]).sum().backward()
            found.append(model.experts[0].weight.grad.full_tensor().clone())
        return found


def x_of(rank: int) -> torch.Tensor:
    return torch.full((1, 8), 1.0 + rank, dtype=torch.float64)


def check_ordered(ranks, orders: list[tuple[list[int], list[int]]]) -> None:
    """All ranks have the gradients of one process that runs every rank's forward."""
    torch.manual_seed(0)
    plain, want = Chosen().double(), []
    for order in orders:
        for rank, mine in enumerate(order):
            plain(x_of(rank), mine).sum().backward()
        want.append(plain.experts[0].weight.grad.clone())
    for found in ranks.run(ordered, 2, orders):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=0)


def test_a_rank_that_leaves_the_order_alone_is_named(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(ordered, 2, [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [0, 2, 1])], timeout_s=60)
    assert "entered units in another order than before, in forward" in str(caught.value)
    assert "Sharding(units=" in str(caught.value)


def test_ranks_that_leave_it_together_agree_anew(ranks):
    same = [([0, 1, 2], [0, 1, 2]), ([2, 1, 0], [2, 1, 0]), ([1, 0, 2], [1, 0, 2]), ([0, 1, 2], [0, 1, 2])]
    check_ordered(ranks, same)


def test_in_the_first_forward_any_order_on_any_rank_is_right(ranks):
    check_ordered(ranks, [([0, 1, 2], [2, 0, 1])])


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, x, used):
        for number in used:
            x = torch.tanh(self.blocks[number](x))
        return self.head(x)


def two_stacks() -> list[nn.Module]:
    torch.manual_seed(5)
    return [Stack().double() for _ in range(2)]


def of_two(rank: int, step: int, skipped: int | None) -> tuple[torch.Tensor, list[int]]:
    used = [i for i in range(4) if i != skipped or not step or rank == 1]
    return torch.full((2, 4), 1.0 + rank, dtype=torch.float64), used


def two_models(skipped: int | None) -> list[torch.Tensor]:
    """One loss over two models, of which the second skips a block on one rank; the gradients after three steps."""
    with init("dp_shard=2", device="cpu", timeout_s=30) as world:
        options = {"sharding": Sharding(min_unit_bytes=0, prefetch="none")}
        first, second = (parallelize(model, world, **options) for model in two_stacks())
        for step in range(3):
            x, used = of_two(world.rank, step, skipped)
            with window(first, [{"x": x}], count=len) as a, window(second, [{"x": x}], count=len) as b:
                for given, _ in zip(a, b, strict=True):
                    second(first(given["x"], [0, 1, 2, 3]), used).sum().backward()
        return [param.grad.full_tensor() for model in (first, second) for param in model.parameters()]


def check_two_models(ranks, skipped: int | None) -> None:
    first, second = two_stacks()
    for step in range(3):
        for rank in range(2):
            x, used = of_two(rank, step, skipped)
            second(first(x, [0, 1, 2, 3]), used).sum().backward()
    want = [param.grad for model in (first, second) for param in model.parameters()]
    for found in ranks.run(two_models, 2, skipped, timeout_s=60):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)


def test_two_models_in_one_loss_of_which_ranks_skip_blocks_are_told_of_it(ranks):
    """The order of units is each model's own: collectives of the two crossed, and gradients were 0.1 to 1.2 off without a word."""
    check_two_models(ranks, None)
    check_two_models(ranks, 2)  # its turn comes before the other model's
    with pytest.raises(RankError) as caught:
        check_two_models(ranks, 0)
    assert "entered other units" in str(caught.value) or "wait for each other" in str(caught.value)
