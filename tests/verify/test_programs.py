"""Drawn programs give the numbers of one process, or are refused by name: see :mod:`verify.programs`."""

import pytest
from verify import programs

RIGHT = [0, 3, 12]
"""Programs that nothing refuses."""


@pytest.mark.quick("3")
@pytest.mark.parametrize("seed", RIGHT)
def test_a_drawn_program_has_the_numbers_of_one_process(ranks, seed):
    assert ranks.run(programs.run, 2, seed, 2)[0] is None


@pytest.mark.soak
@pytest.mark.parametrize(("num", "first"), [(num, first) for num in (2, 4) for first in range(1000, 1200, 20)])
def test_many_have_them_or_are_refused_by_name(ranks, num, first):
    refused = [text for seed in range(first, first + 20) if (text := ranks.run(programs.run, num, seed, num)[0])]
    assert len(refused) <= 8, "\n".join(refused)
    assert all("\n  why: " in text and "\n  fix: " in text for text in refused)
