"""The benchmark of the loss without logits checks that its contenders are equal, and writes what it measured."""

from benchmarks.scripts import script


def test_its_table():
    benchmark = script("linear_loss")
    found = benchmark.measure(2, positions=120, width=16, vocab=400)
    text = benchmark.table(found)
    memory = {name: of_name for name, (_, of_name) in found.items()}
    assert 0 < memory["`sw.linear_cross_entropy`"] < 0.3 < 1.9 < memory["plain: logits, then `F.cross_entropy`"]
    assert text.count("\n") == 1 + len(benchmark.CONTENDERS) and "| 1.00 |" in text
