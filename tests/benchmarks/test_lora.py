"""The benchmark of adapters checks that its contenders are equal, and writes what it counted."""

import pytest
from benchmarks.scripts import script


def sums(kind):
    return script("lora").measure_sums(kind)


def sizes(layout):
    return script("lora").measure_bytes(layout, 32)


def times():
    return script("lora").measure_times(2, width=16, warmup=0)


def rounded(*args):
    return script("lora").measure_bf16(*args)


@pytest.mark.soak
def test_bf16_under_tp_is_beside_float64(ranks):
    benchmark = script("lora")
    sizes = {**benchmark.LARGE, "hidden_size": 80, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    text = benchmark.bf16_table(lambda _, num, *args: ranks.run(rounded, num, *args, timeout_s=100), sizes)
    cells = [float(cell) for row in text.splitlines()[2:] for cell in row.split("|")[2:-1]]
    assert len(cells) == 12 and 0 < max(cells) < 0.1, text


def test_the_table_of_compiled_blocks_has_ratios():
    benchmark = script("lora")
    of = {"compile": 2.0, "compiled": 0.1, "plain": 0.2, "breaks": 0, "graphs": 1}
    text = benchmark.compiled_table(dict.fromkeys(benchmark.COMPILED, of))
    assert text.count("| 2.0 | 1.00 | 0 | 100 | 200 | 0.50 |") == len(benchmark.COMPILED)


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
