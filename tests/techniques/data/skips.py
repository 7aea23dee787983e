"""Training loops in which ranks run other blocks than each other: layer drop, early exit, text-only batches, experts."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models.stacks import (
    BLOCKS,
    CLASSES,
    Albert,
    Checkpointed,
    Dropping,
    Experts,
    Frozen,
    Records,
    Spans,
    Stack,
    Stepping,
    VisionLanguage,
)  # fmt: skip
from torch import Tensor, nn

MICRO, STEPS = 2, 3


@dataclass(frozen=True)
class At:
    """Which micro-batch of which window a rank runs. Batches are of unequal size, and so are their token counts."""

    rank: int
    step: int
    micro: int

    @property
    def number(self) -> int:
        return (self.step * MICRO + self.micro) * 4 + self.rank

    @property
    def x(self) -> Tensor:
        size = 2 + self.number % 3
        return torch.randn(size, 4, generator=torch.Generator().manual_seed(self.number), dtype=torch.float64)

    @property
    def labels(self) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + self.number)
        labels = torch.randint(0, CLASSES, (len(self.x),), generator=generator)
        labels[: self.number % 2] = -100
        return labels

    @property
    def num_tokens(self) -> int:
        return int((self.labels != -100).sum())


def loss_of(logits: Tensor, at: At) -> Tensor:
    return F.cross_entropy(logits, at.labels, reduction="sum")


# ---- which blocks a rank runs, in what order -------------------------------------------------------------------------


def _drawn(at: At) -> list[int]:
    keep = torch.rand(BLOCKS, generator=torch.Generator().manual_seed(77 + at.number)) < 0.5
    return [i for i in range(BLOCKS) if keep[i]]


def _without(*skipped: set[int]) -> Callable[[At], list[int]]:
    return lambda at: [i for i in range(BLOCKS) if i not in skipped[at.rank % len(skipped)]]


ALL = list(range(BLOCKS))
ORDERS: dict[str, Callable[[At], list[int]]] = {
    "one block on one rank": _without({1}, set()),
    "all blocks on one rank": _without(set(ALL), set()),
    "others on each rank": _without({1, 2}, {3}),
    "the first, the last": _without({0}, {3}),
    "all but one each": _without({0, 1, 2}, {1, 2, 3}),
    "nothing anywhere": lambda at: [],
    "one that no rank runs": _without({2}, {2}),
    "drawn anew each time": _drawn,
    "early exit": lambda at: ALL[: 1 + (at.number * 7 + at.rank) % BLOCKS],
    "one rank begins late": lambda at: ALL if at.rank == 0 or at.step > 1 else [],
    "a block comes in later": lambda at: [0, 1, 3] if at.step == 0 or at.rank == 0 else ALL,
    "backwards": lambda at: ALL[::-1],
    "backwards, with skips": lambda at: [i for i in ALL[::-1] if i != 1 + at.rank],
    "an order that turns": lambda at: ALL[at.step :] + ALL[: at.step],
    "an order that turns round": lambda at: ALL if at.step % 2 else ALL[::-1],
    "twice": lambda at: ALL + ALL,
    "each twice": lambda at: [i for i in ALL for _ in range(2)],
    "again on one rank": lambda at: ALL + (ALL if at.rank else []),
    "one of them again on one rank": lambda at: [0, 1, 2, 3, *([1] if at.rank == 0 else [])],
    "the first micro-batch only": lambda at: ALL if at.micro == 0 else [0, 3],
    "the last micro-batch only": lambda at: ALL if at.micro else [0, 3],
    "the first micro-batch of one rank": lambda at: ALL if at.micro == 0 and at.rank == 0 else [0, 3],
    "no block in the last micro-batch": lambda at: ALL if at.micro == 0 else [],
}


# ---- loops -----------------------------------------------------------------------------------------------------------


Loop = Callable[[nn.Module, At, Callable[[At], list[int]], float], None]


def other(at: At) -> At:
    """For a second forward: what the next rank does."""
    return At(at.rank + 1, at.step, at.micro)


def plain(model: nn.Module, at: At, order: Any, n: float) -> None:
    (loss_of(model(at.x, order(at)), at) / n).backward()


def two_forwards_one_backward(model: nn.Module, at: At, order: Any, n: float) -> None:
    first, second = model(at.x, order(at)), model(at.x * 0.5, order(other(at)))
    ((loss_of(first, at) + (first * second).sum()) / n).backward()


def two_forwards_two_backwards(model: nn.Module, at: At, order: Any, n: float) -> None:
    first, second = model(at.x, order(at)), model(at.x * 0.5, order(other(at)))
    (loss_of(first, at) / n).backward()
    (loss_of(second, at) / n).backward()


def the_second_first(model: nn.Module, at: At, order: Any, n: float) -> None:
    first, second = model(at.x, order(at)), model(at.x * 0.5, order(other(at)))
    (loss_of(second, at) / n).backward()
    (loss_of(first, at) / n).backward()


def one_forward_two_backwards(model: nn.Module, at: At, order: Any, n: float) -> None:
    y = model(at.x, order(at))
    (loss_of(y, at) / n).backward(retain_graph=True)
    (y.square().sum() / n).backward()


def a_forward_for_nothing(model: nn.Module, at: At, order: Any, n: float) -> None:
    model(at.x, order(other(at)))
    (loss_of(model(at.x, order(at)), at) / n).backward()


def looks_without_gradients(model: nn.Module, at: At, order: Any, n: float) -> None:
    """Forwards of other lengths by rank, between those that train."""
    with torch.no_grad():
        before = model(at.x.repeat(1 + at.rank, 1), order(other(at)))
    y = model(at.x, order(at))
    with torch.no_grad():
        target = model(at.x * 2, order(other(at)))
    ((loss_of(y, at) + (y - target - before[: len(y)]).square().sum()) / n).backward()


def part_of_a_forward_without_gradients(model: nn.Module, at: At, order: Any, n: float) -> None:
    blocks = model.blocks
    handle = blocks[0].register_forward_pre_hook(lambda _m, args: (args[0].detach(),))
    (loss_of(model(at.x, order(at)), at) / n).backward()
    handle.remove()


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        plain,
        two_forwards_one_backward,
        two_forwards_two_backwards,
        the_second_first,
        one_forward_two_backwards,
        a_forward_for_nothing,
        looks_without_gradients,
        part_of_a_forward_without_gradients,
    )
}


# ---- of models of other shapes ---------------------------------------------------------------------------------------


def albert(times: Callable[[At], int]) -> Callable[[nn.Module, At, float], None]:
    return lambda model, at, n: (loss_of(model(at.x, times(at)), at) / n).backward()


def _vision(has_pixels: Callable[[At], bool]) -> Callable[[nn.Module, At, float], None]:
    def loop(model: nn.Module, at: At, n: float) -> None:
        pixels = at.x[:, :3] if has_pixels(at) else None
        (loss_of(model(at.x, pixels=pixels), at) / n).backward()

    return loop


def _stack(order: str) -> Callable[[nn.Module, At, float], None]:
    return lambda model, at, n: plain(model, at, ORDERS[order], n)


def _fails(model: nn.Module, at: At, n: float) -> None:
    """A batch that is left out as its forward raises, and another one in its place."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.blocks[2].down.register_forward_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        model(at.x, ALL)
    handle.remove()
    _stack("drawn anew each time")(model, at, n)


def _frozen(model: nn.Module, at: At, n: float) -> None:
    x = at.x.requires_grad_()
    (loss_of(model(x, at.rank), at) / n).backward()


@dataclass(frozen=True)
class Case:
    """A model and what one micro-batch does with it; ``units`` where the recipe would find none."""

    make: Callable[[], nn.Module]
    loop: Callable[[nn.Module, At, float], None]
    units: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make().double()


ONE = ("blocks.0",)
EXPERTS: dict[str, Callable[[At], list[int]]] = {
    "an expert each": lambda at: [at.rank % 3],
    "experts in an order": lambda at: [[0, 2], [1, 2]][at.rank % 2] if at.step else [0, 1, 2],
}
ONE_FORWARD = ("a block comes in later", "backwards, with skips", "one of them again on one rank")
"""Orders of which a second forward, by what the next rank does, leaves what ranks have agreed on: an error by name."""
OF_ONE_FORWARD = ("plain", "one_forward_two_backwards", "part_of_a_forward_without_gradients")
CASES: dict[str, Case] = {
    **{f"{order}: {loop}": Case(Stack, lambda m, at, n, o=order, run=run: run(m, at, ORDERS[o], n))
       for order in ORDERS for loop, run in LOOPS.items() if order not in ONE_FORWARD or loop in OF_ONE_FORWARD},
    "one block, 12 times": Case(Albert, albert(lambda at: 12), ONE),
    "one block, by rank": Case(Albert, albert(lambda at: (3, 7, 0, 5)[at.rank % 4]), ONE),
    "one block, drawn": Case(Albert, albert(lambda at: at.number * 5 % 7 if at.number else 7), ONE),
    "text only on one rank": Case(VisionLanguage, _vision(lambda at: at.rank == 0)),
    "text only at first": Case(VisionLanguage, _vision(lambda at: at.rank == 1 and at.step > 0)),
    "text only in the last micro-batch": Case(VisionLanguage, _vision(lambda at: at.micro == 0)),
    **{name: Case(Experts, lambda m, at, n, c=chosen: (loss_of(m(at.x, c(at)), at) / n).backward())
       for name, chosen in EXPERTS.items()},
    "a forward that fails": Case(Stack, _fails),
    "a frozen tower": Case(lambda: Frozen(False), _frozen),
    "a frozen tower under no_grad": Case(lambda: Frozen(True), _frozen),
    **{f"{text}: {order}": Case(make, _stack(order))
       for text, make in {
           "another method": Stepping,
           "called in vain": Dropping,
           "a result that nobody uses": Records,
           "own checkpoints": lambda: Checkpointed(False),
           "own reentrant checkpoints": lambda: Checkpointed(True),
           "own checkpoints of two": lambda: Spans(False),
           "own reentrant checkpoints of two": lambda: Spans(True),
       }.items()
       for order in ("one block on one rank", "others on each rank", "drawn anew each time", "all but one each")},
    "another method: again on one rank": Case(Stepping, _stack("again on one rank")),
    **{f"another method: {loop}": Case(Stepping, lambda m, at, n, run=LOOPS[loop]: run(m, at, ORDERS["others on each rank"], n))
       for loop in ("a_forward_for_nothing", "looks_without_gradients")},
}  # fmt: skip
"""Name -> what is trained."""
