"""The examples in the docstrings of options say what happens."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["config.loader", "config.target", "run.config", "techniques.precision.options", "techniques.remat.options"]
)
def test_the_example_says_what_happens(name):
    found = doctest.testmod(importlib.import_module(f"shardwise.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
