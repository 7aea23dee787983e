"""The comparison of a step with that of an older commit reads the benchmark's own table, and divides the right figures."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded(folder: str, name: str):
    """The program at ``folder/name.py``, under a name that no room of the tests has."""
    sys.path.insert(0, str(ROOT / folder))
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / folder))
    return module


@pytest.fixture(scope="module")
def tool():
    return loaded("tools", "compare_steps")


def rank(plain, ours):
    names = ("FSDP2 by hand, AdamW(fused=True)", "Shardwise, AdamW(fused=True)")
    times = dict(zip(names, ([plain] * 4, [ours] * 4), strict=True))
    return {"seconds": times, "cpu": {name: [2 * t for t in spent] for name, spent in times.items()}, "num_params": 10}


def test_it_divides_by_the_older_commit(tool):
    step = loaded("benchmarks", "step")
    before = tool.times_of(step.table({"m": [rank(0.10, 0.11)]}))
    now = tool.times_of(step.table({"m": [rank(0.20, 0.33)]}))
    key = ("m (0.0 M)", "Shardwise, AdamW(fused=True)")
    assert before[key] == pytest.approx((110, 220)) and now[key] == pytest.approx((330, 660))
    plain, line = tool.table([before] * 3, [now] * 3).splitlines()[2:]
    assert plain == "| m (0.0 M) | FSDP2 by hand, AdamW(fused=True) | 100.0 | 200.0 | 2.000 | 200.0 | 400.0 | 2.000 |"
    assert line == f"| {key[0]} | {key[1]} | 110.0 | 330.0 | 3.000 | 220.0 | 660.0 | 3.000 |"
