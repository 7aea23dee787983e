"""The benchmark of tensor parallelism checks that its contenders are equal, and writes what it counted."""

from benchmarks.scripts import script


def measured():
    return script("tensor_parallel").measure(4, num_blocks=2, warmup=1)


def test_its_tables(ranks):
    benchmark, found = script("tensor_parallel"), ranks.run(measured, 2)
    assert found[0]["collectives"]["Shardwise, tp=2"] == 4
    assert found[0]["collectives"]["plain, every rank by itself"] == 0
    search = benchmark.measure_search(num_layers=2, degree=4, width=512)
    assert search["regions"] == 4
    text = benchmark.table(found, search)
    assert "| regions found | 4 |" in text and "| torch, parallelize_module |" in text
    assert next(line for line in text.splitlines() if benchmark.REFERENCE in line).count("| 1.00 |") == 1
