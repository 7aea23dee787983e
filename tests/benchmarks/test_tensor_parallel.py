"""The benchmark of tensor parallelism checks that its contenders are equal, and writes what it counted."""

import pytest
from benchmarks.scripts import script


def measured():
    return script("tensor_parallel").measure(4, num_blocks=2, warmup=1)


@pytest.mark.soak
def test_its_tables(ranks):
    benchmark, found = script("tensor_parallel"), ranks.run(measured, 2)
    assert found[0]["collectives"]["Shardwise, tp=2"] == 4
    assert found[0]["collectives"]["plain, every rank by itself"] == 0
    search = benchmark.measure_search(num_layers=2, degree=4, width=512)
    assert search["regions"] == 4
    text = benchmark.table(found, search)
    assert "| regions found | 4 |" in text and "| torch, parallelize_module |" in text
    assert next(line for line in text.splitlines() if benchmark.REFERENCE in line).count("| 1.00 |") == 1


def measured_sequence(is_cut):
    return script("tensor_parallel").measure_sequence(is_cut, num_blocks=2)


def test_what_sequence_parallelism_sends_and_keeps(ranks):
    """Two blocks: a gather behind the last one, and one before the first in backward, beside 4 gathers and 4 sums to rows of each."""
    benchmark = script("tensor_parallel")
    found = {(2, is_cut): ranks.run(measured_sequence, 2, is_cut)[0] for is_cut in (False, True)}
    assert [found[2, False][kind] for kind in ("all_reduce", "all_gather", "reduce_scatter")] == [4, 0, 0]
    assert [found[2, True][kind] for kind in ("all_reduce", "all_gather", "reduce_scatter")] == [0, 5, 4]
    assert found[2, True]["between"] <= 1.03 / 2 * found[2, False]["between"]
    assert found[2, True]["sent"] == found[2, False]["sent"] * 9 / 8
    assert "| `tp=2`, `sequence_parallel=True` | 0 | 5 | 4 |" in benchmark.table_of_sequence(found)
