"""The examples in the docstrings of the config room say what happens."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["options", "loader", "target"])
def test_the_example_says_what_happens(name):
    found = doctest.testmod(importlib.import_module(f"shardwise.config.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
