"""The loss curves of 1, 2 and 4 ranks, and of tensor parallelism, lie on that of one plain process, and the committed figures say so."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name="curves", folder="benchmarks"):
    if f"{name}_script" not in sys.modules:
        spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / folder / f"{name}.py")
        sys.modules[f"{name}_script"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[f"{name}_script"]


def _call(name, *args):
    return getattr(load(), name)(*args)


def _study(ranks, name, steps, timeout_s):
    curves = load()

    def run(function, num_ranks, *args):
        return ranks.run(_call, num_ranks, function.__name__, *args, timeout_s=timeout_s)

    return curves.run_study(curves.STUDIES[name], steps, run)


@pytest.mark.timeout(300)
@pytest.mark.soak  # a minute; step by step the same is seen in tests/verify/test_parity.py
def test_curves_of_1_2_and_4_ranks_are_those_of_one_plain_process_to_1e_5(ranks):
    result = _study(ranks, "fp32", 10, 100)
    worst = load().check(result)
    assert worst["plain"] == 0.0
    assert len(result["curves"]["4 ranks"]) == 10
    assert result["curves"]["4 ranks"][-1] < result["curves"]["4 ranks"][0] - 0.5  # it trained


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "steps"), [("fp32", 300), ("fp64", 500)])
def test_whole_curves_lie_on_each_other(ranks, name, steps):
    load().check(_study(ranks, name, steps, 1500))


def test_a_curve_that_is_further_off_than_the_gate_is_refused():
    plain = [5.0, 4.0]
    result = {"gate": 1e-5, "curves": {**dict.fromkeys(load().LAYOUTS, plain), "plain": plain}}
    assert load().check(result)["4 ranks"] == 0.0
    result["curves"]["4 ranks"] = [5.0, 4.00002]
    with pytest.raises(SystemExit, match="4 ranks: 2"):
        load().check(result)
    result["curves"]["4 ranks"] = [5.0, float("nan")]
    with pytest.raises(SystemExit, match="4 ranks: nan"):
        load().check(result)


def test_the_committed_figures_are_whole_and_within_their_gates():
    found = json.loads((ROOT / "docs/data/curves.json").read_text())
    assert found.keys() == {*load().STUDIES, "made_from"}
    for name, study in load().STUDIES.items():
        result = found[name]
        assert result["gate"] == study.gate and result["overrides"] == list(study.overrides)
        assert result["curves"].keys() >= load().LAYOUTS.keys()
        assert all(len(losses) == result["steps"] for losses in result["curves"].values())
        load().check(result)
    assert found["fp32"]["steps"] == 300


@pytest.mark.soak
def test_the_picture_is_drawn_from_the_figures(tmp_path):
    picture = load("make_picture", "tools")
    out = tmp_path / "curves.svg"
    picture.draw(json.loads((ROOT / "docs/data/curves.json").read_text()), out)
    text = out.read_text()
    assert text.startswith("<?xml") and "</svg>" in text
    again = tmp_path / "again.svg"
    picture.draw(json.loads((ROOT / "docs/data/curves.json").read_text()), again)
    assert (
        again.read_text() == text
    )  # no date, no random ids: the picture in the repository changes with its figures only
