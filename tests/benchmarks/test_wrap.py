"""The sharding benchmark runs, on ranks that are imagined, and compares what both sides hold."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def load():
    if "wrap_benchmark" not in sys.modules:
        spec = importlib.util.spec_from_file_location("wrap_benchmark", ROOT / "benchmarks" / "wrap.py")
        sys.modules["wrap_benchmark"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["wrap_benchmark"]


def _measure(contender, size):
    try:
        return load().measure(contender, size, 3)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("size", [8, pytest.param(8192, marks=pytest.mark.soak)])
def test_both_sides_hold_the_same(ranks, size):
    found = {name: ranks.run(_measure, 1, name, size)[0] for name in load().CONTENDERS}
    (_, by_hand), (_, ours) = found.values()
    assert ours == by_hand and len(ours) == 3 * 9 + 3
    lines = load().table({size: {name: seconds for name, (seconds, _) in found.items()}}).splitlines()
    assert len(lines) == 3 and lines[2].startswith(f"| {size} | ")


def test_sides_that_differ_are_not_put_into_a_table(monkeypatch, capsys):
    shapes = iter(({"w": [2]}, {"w": [3]}))
    monkeypatch.setattr(load(), "_measure_apart", lambda *_: (1.0, next(shapes)))
    with pytest.raises(AssertionError, match="local shapes differ on 8 ranks"):
        load().main(["--ranks", "8"])
    assert capsys.readouterr().out == ""
