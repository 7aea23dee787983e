"""What blocks keep, chosen from sizes and costs: without torch."""

import itertools
import random

import pytest

from shardwise.techniques.remat.choice import Call, Measured, among_ranks, in_words, selective, within_budget


def block(*sizes: tuple[int, int], plain: int = 100, inputs: int = 10, named=()) -> Measured:
    """A block of calls, each of (bytes, cost), all of which can be kept; ``named``: the numbers of those of ``save``."""
    calls = (
        Call("aten.mm.default", i, num_bytes, cost, can_be_kept=True, is_named=i in named)
        for i, (num_bytes, cost) in enumerate(sizes)
    )
    return Measured(tuple(calls), plain, inputs)


def bytes_of(chosen) -> int:
    return sum(choice.num_bytes for choice in chosen)


def test_selective_keeps_what_is_named():
    chosen = selective(block((20, 5), (30, 1), (30, 7), named=(0, 2)))
    assert chosen.kept == {("aten.mm.default", 0), ("aten.mm.default", 2)} and not chosen.keeps_all
    assert (chosen.num_bytes, chosen.cost) == (10 + 20 + 30, 1)


@pytest.mark.parametrize(("plain", "keeps_all"), [(61, False), (60, True), (40, True)])
def test_selective_keeps_all_where_that_is_no_more(plain, keeps_all):
    chosen = selective(block((20, 5), (30, 7), plain=plain, named=(0, 1)))
    assert chosen.keeps_all == keeps_all and chosen.num_bytes == min(plain, 60)


def test_what_cannot_be_kept_runs_again_and_what_must_be_is_kept():
    calls = (
        Call("aten.mm.default", 0, 20, 5, can_be_kept=False, is_named=True),
        Call("aten.topk.default", 0, 8, 3, is_always_kept=True),
    )
    assert selective(Measured(calls, 100, 10)).kept == {("aten.topk.default", 0)}
    (least,) = within_budget([Measured(calls, 100, 10)], 18)
    assert least.kept == {("aten.topk.default", 0)} and least.num_bytes == 18


def test_a_budget_buys_first_what_costs_most_for_its_bytes():
    one = block((40, 4), (10, 9), (20, 8))
    assert [c.kept for c in within_budget([one], 20)] == [{("aten.mm.default", 1)}]
    assert [c.kept for c in within_budget([one], 40)] == [{("aten.mm.default", 1), ("aten.mm.default", 2)}]
    assert [c.keeps_all for c in within_budget([one], 100)] == [True]


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_is_held_and_used(seed):
    """Against all combinations of what each block may keep: never more bytes; never more cost than that of the best, but for the one
    step that did not fit any more."""
    numbers = random.Random(seed)
    blocks = []
    for _ in range(numbers.randint(1, 4)):
        sizes = [(numbers.randint(1, 30), numbers.randint(1, 50)) for _ in range(numbers.randint(0, 4))]
        plain = numbers.randint(5, sum(size for size, _ in sizes) + 30)
        blocks.append(block(*sizes, plain=plain, inputs=numbers.randint(0, 12)))
    least = bytes_of(within_budget(blocks, 10**9 if not blocks else _least(blocks)))
    most = sum(b.plain_bytes for b in blocks)
    for budget in range(least, max(most, least) + 3, max(1, most // 12)):
        chosen = within_budget(blocks, budget)
        assert bytes_of(chosen) <= budget
        best = min(
            sum(cost for _, cost in combination)
            for combination in itertools.product(*(list(_all_options(b)) for b in blocks))
            if sum(size for size, _ in combination) <= budget
        )
        largest = max((b.cost for b in blocks), default=0)
        assert best <= sum(choice.cost for choice in chosen) <= best + largest
    assert within_budget(blocks, most + 1000) is not None
    assert all(choice.cost == 0 for choice in within_budget(blocks, 10**9))


def _least(blocks) -> int:
    return sum(min(b.input_bytes, b.plain_bytes) for b in blocks)


def _all_options(one: Measured):
    yield one.plain_bytes, 0
    for count in range(len(one.calls) + 1):
        for kept in itertools.combinations(one.calls, count):
            size = one.input_bytes + sum(call.num_bytes for call in kept)
            yield size, one.cost - sum(call.cost for call in kept)


def test_less_than_the_inputs_is_no_choice():
    assert within_budget([block((5, 5)), block((5, 5))], 19) is None
    assert within_budget([block((5, 5)), block((5, 5))], 20) is not None
    assert within_budget([], 1) == []


def test_ranks_go_by_the_largest():
    small, large = block((10, 2), (4, 8), plain=30), block((20, 4), (8, 1), plain=60, inputs=20)
    both = among_ranks([small, None, large])
    assert both == block((20, 4), (8, 8), plain=60, inputs=20)
    assert among_ranks([None, None]) is None


def test_ranks_that_made_other_calls_keep_no_single_result():
    both = among_ranks([block((10, 2)), block((20, 4), (8, 1), plain=60)])
    assert both.plain_bytes == 100 and both.cost == 5
    assert selective(both).kept == frozenset() and [c.kept for c in within_budget([both], 99)] == [frozenset()]


def test_what_was_chosen_is_said():
    blocks = [block((40, 4), (10, 6), plain=45), block((40, 4), (10, 6), plain=45), block((9, 1), plain=50)]
    assert in_words(blocks, within_budget(blocks, 75)) == (
        "kept for backward by 1 block: all; 1 block: inputs and matmul; 1 block: inputs only. That is 75 B in a micro-batch (140 B "
        "without remat), and 24% of their forward runs again"
    )
