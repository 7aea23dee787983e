"""The examples about units and values print the same on one rank and on two."""

import contextlib
import io
import re
import runpy
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_script(path: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", ["example_units.py", "example_init.py", "example_remat.py"])
def test_the_examples_print_the_same_alone_and_on_two_ranks(ranks, name):
    path = str(EXAMPLES / name)
    alone, (first, second) = ranks.run(run_script, 1, path)[0], ranks.run(run_script, 2, path)
    assert first == alone and second == ""
    assert len(re.findall(r"\d+\.\d+", alone)) >= 6
