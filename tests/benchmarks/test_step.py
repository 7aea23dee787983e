"""The step benchmark runs, tells its figures, and refuses to time contenders that do not compute the same."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import pytest

from shardwise.errors import RankError

ROOT = Path(__file__).resolve().parents[2]


def load():
    if "step_benchmark" not in sys.modules:
        spec = importlib.util.spec_from_file_location("step_benchmark", ROOT / "benchmarks" / "step.py")
        sys.modules["step_benchmark"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["step_benchmark"]


def _measure(part="step", scale=1.0):
    benchmark = load()
    right = benchmark.CONTENDERS["Shardwise, AdamW"]

    def wrong(module, world):
        step = right(module, world)

        def scaled(window):
            with_fault = step(window)
            for param in module.parameters():
                param.data.mul_(scale)
            return with_fault

        return scaled

    if scale == 1.0:
        return benchmark.measure("tiny", 2, 1, part)
    first = next(iter(benchmark.CONTENDERS))  # whose parameters are those that the others are compared with
    two = {first: benchmark.CONTENDERS[first], "wrong": wrong}
    with mock.patch.dict(benchmark.CONTENDERS, two, clear=True):
        return benchmark.measure("tiny", 2, 1)


@pytest.mark.quick("replicas")
@pytest.mark.parametrize("part", ["step", "replicas"])
def test_every_contender_is_timed_after_the_check(ranks, part):
    _, contenders, reference = load().PARTS[part]
    results = {"tiny": ranks.run(_measure, 2, part, timeout_s=100)}
    lines = load().table(results, reference).splitlines()
    assert len(lines) == 2 + len(contenders)
    assert all("| tiny (0.0 M) |" in line for line in lines[2:])
    assert next(line for line in lines if reference in line).count("| 1.00 |") == 2


def test_a_contender_with_other_parameters_is_not_timed(ranks):
    with pytest.raises(RankError, match=r"'wrong': .* differs by"):
        ranks.run(_measure, 2, "step", 1.0001, timeout_s=100)
