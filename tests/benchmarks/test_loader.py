"""The benchmark of the loader checks that its contenders give each sample once, and writes what it measured."""

import pytest
import torch
from benchmarks.scripts import script


def measured() -> str:
    found = script("loader")
    return found.table(found.measure(2, num=20, seconds=0.001))


def test_its_table(ranks):
    text = ranks.run(measured, 1)[0]
    assert text.count("\n") == 1 + len(script("loader").CONTENDERS) and "| 1.00 |" in text


def test_a_loader_that_loses_a_sample_is_not_timed():
    with pytest.raises(AssertionError, match="a sample is missing"):
        script("loader")._check([[{"labels": torch.tensor([0, 1, 1])}]], 3)
