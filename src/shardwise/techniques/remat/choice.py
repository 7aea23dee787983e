"""Chooses, from what one run of each block has shown, what it keeps for backward: all, some results, or its inputs only.

Torch-free: works on sizes and costs. The same input gives the same choice, so that ranks which have exchanged their
measurements choose alike.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.recipe import human_bytes

GROUPS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ),
}
"""Words for several operators of aten."""


@dataclass(frozen=True)
class Call:
    """One call of an operator in a block's forward.

    Attributes:
        operator: its name with the overload, as ``aten.mm.default``.
        nth: of the calls of this operator in the block, counted from 0.
        num_bytes: of the memory that its results take anew.
        cost: of calling it again; see :func:`~shardwise.techniques.remat.measure.cost_of`.
        can_be_kept: its results are not changed later, are no views, and draw no random numbers.
        is_named: the user's ``save`` names the operator.
        is_always_kept: a second call could give another result; see :func:`~shardwise.techniques.remat.operators.always_kept`.
    """

    operator: str
    nth: int
    num_bytes: int
    cost: int
    can_be_kept: bool = False
    is_named: bool = False
    is_always_kept: bool = False


@dataclass(frozen=True)
class Measured:
    """What one run of a block has shown.

    Attributes:
        calls: the calls that a second run makes until it has all that backward needs.
        plain_bytes: of what forward keeps for backward without remat, but for parameters, and for what blocks before it
            keep already.
        input_bytes: of its inputs, which are kept to run it again, but for what blocks before it keep already.
    """

    calls: tuple[Call, ...]
    plain_bytes: int
    input_bytes: int

    @property
    def cost(self) -> int:
        return sum(call.cost for call in self.calls)


@dataclass(frozen=True)
class Choice:
    """What a block does from now on.

    Attributes:
        keeps_all: it does not run again.
        kept: (operator, number of the call) whose results are kept besides the inputs, if it runs again.
        num_bytes: of all that is kept for backward.
        cost: of what runs again.
    """

    keeps_all: bool = False
    kept: frozenset[tuple[str, int]] = frozenset()
    num_bytes: int = 0
    cost: int = 0


def among_ranks(found: Sequence[Measured | None]) -> Measured | None:
    """What all ranks go by: the largest sizes. Single results are kept only where all ranks that ran the block made the
    same calls."""
    known = [each for each in found if each is not None]
    if not known:
        return None
    plain, given = max(each.plain_bytes for each in known), max(each.input_bytes for each in known)
    if len({tuple((call.operator, call.nth) for call in each.calls) for each in known}) > 1:
        longest = max(known, key=lambda each: each.cost)
        return Measured((Call("", 0, 0, longest.cost),), plain, given)
    calls = tuple(
        Call(
            same[0].operator,
            same[0].nth,
            max(call.num_bytes for call in same),
            max(call.cost for call in same),
            all(call.can_be_kept for call in same),
            same[0].is_named,
            same[0].is_always_kept,
        )
        for same in zip(*(each.calls for each in known), strict=True)
    )
    return Measured(calls, plain, given)


def selective(block: Measured) -> Choice:
    """The results of the operators that the user named, as far as the second run needs them; all, without a second run,
    where that keeps no more."""
    chosen = _keeping(block, [call for call in block.calls if call.is_named])
    return chosen if chosen.num_bytes < block.plain_bytes else Choice(keeps_all=True, num_bytes=block.plain_bytes)


def within_budget(blocks: Sequence[Measured], budget: int) -> list[Choice] | None:
    """For each block what makes the second runs of all cost least, while all blocks together keep at most ``budget``
    bytes; None: they keep more with all of them run again.

    By steps, each from a block's present choice to one that keeps more, in the order of the cost that a byte saves
    (Dantzig's rule for the multiple-choice knapsack problem).
    """
    ladders = [_ladder(block) for block in blocks]
    chosen = [ladder[0] for ladder in ladders]
    left = budget - sum(choice.num_bytes for choice in chosen)
    if left < 0:
        return None
    steps = [(low, high, i) for i, ladder in enumerate(ladders) for low, high in itertools.pairwise(ladder)]
    steps.sort(key=lambda step: -_saved_per_byte(step[0], step[1]))  # within a ladder they fall already
    for low, high, i in steps:
        extra = high.num_bytes - chosen[i].num_bytes
        if chosen[i] is low and extra <= left:
            chosen[i], left = high, left - extra
    for i, ladder in enumerate(ladders):  # what a step that was too large has left over
        for high in ladder:
            extra = high.num_bytes - chosen[i].num_bytes
            if high.cost < chosen[i].cost and extra <= left:
                chosen[i], left = high, left - extra
    return chosen


def _keeping(block: Measured, calls: Sequence[Call]) -> Choice:
    """Its inputs, the results of ``calls`` where that can be done, and those that are always kept."""
    able = {call for call in calls if call.can_be_kept} | {call for call in block.calls if call.is_always_kept}
    return Choice(
        kept=frozenset((call.operator, call.nth) for call in able),
        num_bytes=block.input_bytes + sum(call.num_bytes for call in able),
        cost=block.cost - sum(call.cost for call in able),
    )


def _ladder(block: Measured) -> list[Choice]:
    """The choices for a block from its inputs only to all, of which none costs more for its bytes than a mix of its
    neighbours would."""
    by_worth = sorted(
        (call for call in block.calls if call.can_be_kept and call.num_bytes and call.cost),
        key=lambda call: -call.cost / call.num_bytes,
    )
    options = [_keeping(block, by_worth[:count]) for count in range(len(by_worth) + 1)]
    options = [option for option in options if option.num_bytes < block.plain_bytes]
    options.append(Choice(keeps_all=True, num_bytes=block.plain_bytes))
    ladder: list[Choice] = []
    for option in options:
        while len(ladder) > 1 and _saved_per_byte(ladder[-1], option) >= _saved_per_byte(ladder[-2], ladder[-1]):
            ladder.pop()
        if len(ladder) == 1 and option.num_bytes <= ladder[0].num_bytes:
            ladder.pop()  # a block that keeps nothing anyway
        ladder.append(option)
    return ladder


def _saved_per_byte(low: Choice, high: Choice) -> float:
    return (low.cost - high.cost) / max(1, high.num_bytes - low.num_bytes)


def in_words(blocks: Sequence[Measured], chosen: Sequence[Choice]) -> str:
    """What was chosen for these blocks, for people."""
    counts: Counter[str] = Counter()
    for choice in chosen:
        operators = sorted({_word(operator) for operator, _ in choice.kept})
        kept = "all" if choice.keeps_all else f"inputs and {', '.join(operators)}" if operators else "inputs only"
        counts[kept] += 1
    held, plain = sum(choice.num_bytes for choice in chosen), sum(block.plain_bytes for block in blocks)
    again = sum(choice.cost for choice in chosen) / max(1, sum(block.cost for block in blocks))
    parts = "; ".join(f"{count} block{'s' if count > 1 else ''}: {kept}" for kept, count in counts.items())
    return (
        f"kept for backward by {parts}. That is {human_bytes(held)} in a micro-batch ({human_bytes(plain)} without remat), and "
        f"{100 * again:.0f}% of their forward runs again"
    )


def _word(operator: str) -> str:
    """How an operator is called for people: by its group, or as ``mylib.op``, ``gelu``."""
    name = operator.removeprefix("aten.").rpartition(".")[0]
    return next((word for word, names in GROUPS.items() if name in names), name)
