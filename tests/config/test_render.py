"""Writing: what is written loads back equal, and every line says where its value came from."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import Parallel, Precision, Sharding
from shardwise.config.render import config_help, dump_config, print_config
from shardwise.run.config import Data, Log, Model, RunConfig, Train, load_config

texts = st.text(max_size=12) | st.sampled_from(
    ["no", "1e3", "~", "a: b", "a #b", "- a", "{", "0x1", ".inf", "\u2028", ""]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


def back(config, folder):
    file = folder / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    return load_config(file).config


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(parallel=Parallel(precision="bf16", init="rank0", layout="dp_replicate=2,dp_shard=-1")),
        RunConfig(parallel=Parallel(precision=Precision(compute="half"), sharding=Sharding(units=("a.*", "B: #c")))),
        RunConfig(train=Train(steps=3, max_grad_norm=None, timeout_s=1e-07), log=Log(dir="C:\\runs\\\u00e9 'x'")),
        RunConfig(data=Data(path="no")),
    ],
    ids=range(5),
)
def test_what_is_written_loads_back_equal(config, tmp_path):
    assert back(config, tmp_path) == config


@settings(max_examples=30)  # each writes and reads a file
@given(st.dictionaries(texts, values, max_size=4))
def test_free_arguments_load_back_equal(tmp_path_factory, args):
    config = RunConfig(model=Model(build="a:b", args=args))
    assert back(config, tmp_path_factory.mktemp("dump")) == config


def test_each_line_ends_in_its_origin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model:\n  args: {dim: 64}\ntrain:\n  steps: 20\n")
    text = print_config(load_config("run.yaml", ["--optim.lr=3e-4"]))
    found = dict(map(str.strip, line.split("  # ")) for line in text.splitlines())
    assert found["steps: 20"] == "run.yaml:4"
    assert found["dim: 64"] == "run.yaml:2"
    assert found["lr: 0.0003"] == "override --optim.lr"
    assert found["seed: 0"] == "default"
    assert found["train:"] == "how long, and by which rules"
    assert all(found.values())


def test_what_is_printed_is_a_configuration(tmp_path):
    loaded = load_config(None, ["--model.args={a: {b: 1}}", "--parallel.precision={compute: bf16}"])
    (tmp_path / "printed.yaml").write_text(print_config(loaded))
    assert load_config(tmp_path / "printed.yaml").config == loaded.config


def test_help_names_every_key_with_its_default():
    text = config_help(RunConfig)
    for key in load_config(None).origins:
        assert f"    {key}=" in text
    assert "optim.momentum=0.9\n        momentum (sgd) [a number >= 0 and < 1]" in text
