"""Transforms of one's own: by name, in list order, with the numbers of one process; a failure names the transform."""

import pytest
import torch
from models.towers import TwoTowers
from techniques.transforms.changes import Widen, widen

import shardwise as sw
from shardwise.run.config import load_config
from shardwise.step.window import window
from shardwise.techniques.transforms import options as transforms
from shardwise.techniques.transforms.options import choose
from shardwise.techniques.transforms.prepare import prepare


def build():
    return TwoTowers()


def run(layout, transforms, from_module=False):
    with sw.init(layout, device="cpu", timeout_s=20, seed=3) as world:
        model = sw.parallelize(build() if from_module else build, world, transforms=transforms)
        x = torch.full((2, 4), 1.0 + world.rank)
        with window(model, [{"x": x}], count=len) as w:
            for each in w:
                model(each["x"]).pow(2).sum().backward()
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
        notes = [note.why for note in sw.recipe_of(model).notes if note.name == "transform"]
        return {n: tuple(p.shape) for n, p in whole.items()}, {n: p.detach().clone() for n, p in whole.items()}, notes


@pytest.mark.parametrize("from_module", [False, True])
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_in_list_order_under_every_layout(ranks, layout, from_module):
    transforms = ["widen", "wrapped"] if from_module else [Widen(factor=3), {"name": "wrapped"}]
    shapes, values, notes = ranks.run(run, 2, layout, transforms, from_module)[0]
    factor = 2 if from_module else 3
    assert shapes["0.image.0.weight"] == (4 * factor, 4) and shapes["1.weight"] == (3, 4)
    assert notes == [f"widen: Widen(factor={factor})", "wrapped"]
    if not from_module:  # what a transform adds has seeded values too, the same under every layout
        alone = ranks.run(run, 1, "dp_shard=1", transforms)[0][1]
        assert all(torch.equal(values[name], alone[name]) for name in alone)


@pytest.mark.parametrize("from_module", [False, True])
def test_the_world_and_the_device_are_given_to_one_that_asks(ranks, from_module):
    given = ["on_device", {"name": "for_world", "multiple": 2}]
    shapes, _, notes = ranks.run(run, 2, "dp_shard=2", given, from_module)[0]
    assert shapes["1.weight"] == (8, 4)  # 2 rows for each pair of ranks
    assert notes == ["on_device", "for_world: Pad(multiple=2)"]


def test_without_a_world_one_that_needs_it_is_refused_and_one_with_a_default_runs():
    """As sw.verify builds the module for its plain process."""
    assert prepare(build(), None, None, transforms=choose("on_device")).was_given == (False, "cpu")
    with pytest.raises(
        sw.UsageError, match=r"transform 'for_world' \(1 of 1\): it takes the world.*\n.*\n.*world=None"
    ):
        prepare(build(), None, None, transforms=choose("for_world"))


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        (
            ["broken"],
            "transform 'broken' (1 of 1)\n  why: it raised AttributeError: 'TwoTowers' object has no attribute",
        ),
        (["widen", "wrong"], "transform 'wrong' (2 of 2)\n  why: it returned a int"),
        (["widne"], "did you mean 'widen'?"),
        ([{"name": "widen", "factr": 3}], "did you mean 'factor'?"),
        ([{"name": "widen", "factor": "x"}], "expected a whole number"),
        ([{"factor": 2}], "it has no name"),
        ([{"name": "wrapped", "x": 1}], "'wrapped' has no options"),
        (["wrapped", "widen"], "'wrapped' must come after 'widen'"),
        ([sw.Sharding()], "no transform is registered with the config Sharding"),
        ([build], "transforms=[build]\n  why: that function is not a transform"),
        (["techniques.data.loops:two_forwards_two_backwards"], "that function is not a transform"),
    ],
)
def test_a_failure_names_the_transform(transforms, text):
    with pytest.raises(sw.ShardwiseError) as caught:
        prepare(build(), None, None, transforms=choose(transforms))
    assert text in str(caught.value)


def test_no_transform_is_registered(monkeypatch):
    """The fix listed those there are: "(none)"."""
    monkeypatch.setattr(transforms, "_known", {})
    with pytest.raises(sw.ConfigError) as caught:
        choose(["widen"])
    assert caught.value.fix == 'name the function with its module: "pkg.mod:function"'


def test_a_name_is_taken_once():
    assert sw.transform("widen", Widen)(widen) is widen  # the module imported once more
    with pytest.raises(sw.ConfigError, match="has that name"):
        sw.transform("widen")(build)


@pytest.mark.parametrize("given", [[widen], widen, {"name": "widen"}, Widen(), "widen"])
def test_the_function_itself_and_one_without_a_list(given):
    assert [str(each) for each in choose(given)] == ["widen: Widen(factor=2)"]


def test_a_transform_without_a_name_is_refused():
    with pytest.raises(sw.ConfigError, match="a transform needs a name") as caught:
        sw.transform(build)
    assert '@sw.transform("build")' in str(caught.value)


def test_from_a_file_and_by_place(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "parallel:\n  transforms: [techniques.transforms.changes:wrapped, {name: widen, factor: 5}]\n"
    )
    given = load_config(str(tmp_path / "run.yaml"), []).config.parallel.transforms
    with pytest.raises(sw.ConfigError, match="must come after"):
        choose(given)
    assert [str(each) for each in choose(given[1:])] == ["widen: Widen(factor=5)"]
