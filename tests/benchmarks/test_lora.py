"""The benchmark of adapters checks that its contenders are equal, and writes what it counted."""

import pytest
from benchmarks.scripts import script


def sums(kind):
    return script("lora").measure_sums(kind)


def sizes(layout):
    return script("lora").measure_bytes(layout, 32)


def times():
    return script("lora").measure_times(2, width=16, warmup=0)


@pytest.mark.soak
def test_its_tables(ranks):
    pytest.importorskip("peft")
    benchmark = script("lora")
    found = ranks.run(sums, 2, "Llama", timeout_s=100)[0]
    without, lora, dora, peft = (found[name] for name in benchmark.SUMS)
    assert lora == peft < without and lora < dora
    held = {"dp_shard=1": ranks.run(sizes, 1, "dp_shard=1")[0], "dp_shard=2": ranks.run(sizes, 2, "dp_shard=2")[0]}
    for name in benchmark.BYTES:
        assert held["dp_shard=2"][name] == pytest.approx(held["dp_shard=1"][name] / 2, rel=0.02), name
    text = benchmark.table({"Llama": found}, held, ranks.run(times, 1, timeout_s=100)[0])
    assert f"| `lora=sw.LoRA(...)` | {lora} |" in text and "| PEFT, a plain loop |" in text
