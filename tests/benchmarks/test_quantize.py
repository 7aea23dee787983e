"""The benchmark of weights in 4 bits compares codes and values before it times anything."""

import pytest
from benchmarks.scripts import script


def loaded():
    return script("quantize").measure_load(2, 128)


def test_its_table(ranks):
    pytest.importorskip("bitsandbytes")
    benchmark = script("quantize")
    text = benchmark.table(benchmark.measure_codes(128, 2), ranks.run(loaded, 1)[0], 2, 128)
    assert "| packing, million numbers a second |" in text and "of 2 x [128, 128]" in text
