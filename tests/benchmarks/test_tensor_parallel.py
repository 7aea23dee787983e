"""The benchmark of tensor parallelism checks that its contenders are equal, and writes what it counted."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load():
    spec = importlib.util.spec_from_file_location("tensor_parallel_script", ROOT / "benchmarks/tensor_parallel.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured():
    return load().measure(4, num_blocks=2, warmup=1)


def test_its_tables(ranks):
    script, found = load(), ranks.run(measured, 2)
    assert found[0]["collectives"]["Shardwise, tp=2"] == 4
    assert found[0]["collectives"]["plain, every rank by itself"] == 0
    search = script.measure_search(num_layers=4, degree=4, width=512)
    assert search["regions"] == 8
    text = script.table(found, search)
    assert "| regions found | 8 |" in text and "| torch, parallelize_module |" in text
    assert text.count("| 1.00 |") == 1
