"""The benchmark of the loader checks that its contenders give each sample once, and writes what it measured."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("loader_script", ROOT / "benchmarks/loader.py")
    sys.modules[spec.name] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def measured() -> str:
    found = script()
    return found.table(found.measure(2, num=20, seconds=0.001))


def test_its_table(ranks):
    text = ranks.run(measured, 1)[0]
    assert text.count("\n") == 1 + len(script().CONTENDERS) and "| 1.00 |" in text


def test_a_loader_that_loses_a_sample_is_not_timed():
    with pytest.raises(AssertionError, match="a sample is missing"):
        script()._check([[{"labels": torch.tensor([0, 1, 1])}]], 3)
