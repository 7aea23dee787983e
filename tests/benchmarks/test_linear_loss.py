"""The benchmark of the loss without logits checks that its contenders are equal, and writes what it measured."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_its_table():
    spec = importlib.util.spec_from_file_location("linear_loss_script", ROOT / "benchmarks/linear_loss.py")
    sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.measure(2, positions=120, width=16, vocab=400)
    text = script.table(found)
    memory = {name: of_name for name, (_, of_name) in found.items()}
    assert 0 < memory["`sw.linear_cross_entropy`"] < 0.3 < 1.9 < memory["plain: logits, then `F.cross_entropy`"]
    assert text.count("\n") == 1 + len(script.CONTENDERS) and "| 1.00 |" in text
