"""The benchmark of weights in 4 bits compares codes and values before it times anything."""

import pytest
from benchmarks.scripts import script


def loaded(folder):
    return script("quantize").measure_load(folder, 2, 128)


def test_its_table(ranks, tmp_path):
    pytest.importorskip("bitsandbytes")
    benchmark = script("quantize")
    num_bytes = benchmark.write_stack(str(tmp_path), 2, 128)
    seconds, extra = ranks.run(loaded, 1, str(tmp_path))[0]
    others = benchmark.measure_others(str(tmp_path), 2)
    codes = benchmark.measure_codes(128, 2)
    text = benchmark.table(codes, codes, seconds, others, extra / num_bytes, 2, 128)
    assert "| packing, million numbers a second |" in text and "reading 2 x [128, 128]" in text
