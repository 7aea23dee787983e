"""Checkpoints without the frozen base: resumed beside it under every layout, and beside no other."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from state.adapting import base
from state.leaving import digests_of, goes_on, other_values, refused, run, unread

import shardwise as sw
from shardwise.cli.main import main
from shardwise.config.conversion import Conversion
from shardwise.state.convert import convert

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("base")
    base("lora").save_pretrained(made)
    return str(made)


@pytest.mark.parametrize("quantize", [None, pytest.param("nf4", marks=pytest.mark.soak)])
def test_a_run_resumes_under_another_layout(ranks, tmp_path, folder, quantize):
    expected, _ = ranks.run(run, 2, "dp_shard=2", folder, str(tmp_path), 3, False, quantize)[0]
    (checkpoint,) = tmp_path.glob("step-*")
    stored = load_file(checkpoint / "model.safetensors")
    assert all("lora_" in name for name in stored) and len(stored) == 28
    assert json.loads((checkpoint / "training/frozen.json").read_text())["folder"] == folder
    losses, error = ranks.run(run, 2, "tp=2", folder, str(tmp_path), 3, True, quantize)[0]
    assert not error and losses == pytest.approx(expected[1:], rel=1e-12)
    if quantize is None:
        resumes_again(ranks, tmp_path, folder, expected)


def resumes_again(ranks, root, folder, expected):
    """From the checkpoint that the resumed run has saved."""
    losses, error = ranks.run(run, 1, "dp_shard=1", folder, str(root), 3, True)[0]
    assert not error and losses == pytest.approx(expected[2:], rel=1e-12)
    assert {json.loads(path.read_text())["folder"] for path in root.glob("step-*/training/frozen.json")} == {folder}


def test_another_base_is_refused_by_the_first_tensor_that_differs(ranks, tmp_path, folder):
    ranks.run(run, 2, "dp_shard=2", folder, str(tmp_path / "run"), 1, False)
    other = tmp_path / "other"
    base("lora").save_pretrained(other)
    tensors = load_file(other / "model.safetensors")
    tensors[NAME][3, [5, 6]] = tensors[NAME][3, [6, 5]]
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    _, text = ranks.run(run, 2, "tp=2", str(other), str(tmp_path / "run"), 2, True)[0]
    assert text.startswith(f"{NAME}: ") and "has other values there" in text and folder in text
    _, text = ranks.run(run, 1, "dp_shard=1", folder, str(tmp_path / "run"), 2, True, "nf4")[0]
    assert "the model has no such tensor" in text


@pytest.mark.parametrize(
    ("quantize", "layouts"),
    [
        pytest.param(None, {"dp_shard=3": 3, "dp_replicate=2": 2}, id="plain", marks=pytest.mark.soak),
        pytest.param("nf4", {"dp_shard=2": 2, "tp=2": 2}, id="nf4"),
    ],
)
def test_digests_do_not_depend_on_the_layout(ranks, folder, quantize, layouts):
    first, other = (ranks.run(digests_of, size, name, folder, quantize)[0] for name, size in layouts.items())
    assert other == first and len({*first.values()}) > 14


def test_what_reads_weights_says_what_is_missing(ranks, tmp_path, folder, capsys):
    ranks.run(run, 2, "dp_shard=2", folder, str(tmp_path / "run"), 1, False)
    (checkpoint,) = (tmp_path / "run").glob("step-*")
    text, state, _ = ranks.run(unread, 1, folder, str(checkpoint))[0]
    assert "without the frozen ones" in text and folder in text and "strict=False" in text
    stored = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(state[name], value) for name, value in stored.items())
    with pytest.raises(sw.CheckpointError, match="a checkpoint without the frozen weights"):
        convert(Conversion(source=checkpoint, dest=Path(tmp_path / "out"), to="hf"))
    assert not (tmp_path / "out").exists()
    assert not (checkpoint / "config.json").exists()  # by which transformers would open it, and draw the rest
    assert main(["checkpoint", "show", str(checkpoint)]) == 0
    assert f"frozen weights are not in it: {folder}" in capsys.readouterr().out


def test_nothing_frozen_and_a_choice_that_does_not_exist_are_refused(ranks, tmp_path):
    assert "no parameter of the model is frozen" in ranks.run(refused, 1, str(tmp_path), {"frozen": "leave"})[0]
    assert "frozen='drop'" in ranks.run(refused, 1, str(tmp_path), {"frozen": "drop"})[0]


def test_a_base_with_values_that_its_directory_does_not_have_is_not_left_there(ranks, tmp_path, folder):
    """Loaded in part from elsewhere, written by the program (also through .data), loaded from a state dict, from nowhere."""
    part = tmp_path / "part"
    part.mkdir()
    norm = load_file(f"{folder}/model.safetensors")["model.norm.weight"]
    save_file({"model.norm.weight": norm + 1}, part / "model.safetensors", {"format": "pt"})
    Path(folder, "tokenizer_config.json").write_text("{}")
    for found in ranks.run(other_values, 2, folder, str(part), str(tmp_path)):
        assert found["again"] == (folder, (folder, ""))
        for case in ("part", "data", "full"):
            refusal, (named, warning) = found[case]
            assert refusal.startswith("model.norm.weight: ") and "one of 1 of" in refusal and named is None, case
            assert "model.norm.weight, one of 1" in warning or not warning
        assert "model.norm.weight" in found["first"][0] and "beside another base" in found["loaded"][0]
        assert "loaded from no directory" in found["nowhere"][0]
    assert (tmp_path / "weights/tokenizer_config.json").is_file()  # of the base, not of the part
    assert not [*tmp_path.glob("[acde]/step-*")] and len([*tmp_path.glob("b/step-*")]) == 1


def test_the_base_of_a_run_that_resumes_is_that_of_its_own_record(ranks, tmp_path):
    """Not the checkpoint, which is removed when newer ones are there."""
    made, root = tmp_path / "base", str(tmp_path / "run")
    base("lora").save_pretrained(made)
    assert ranks.run(goes_on, 2, "dp_shard=2", str(made), root, "save")[0] == ("none", (str(made), ""))
    first = str(tmp_path / "run/step-00000001")
    text, _ = ranks.run(goes_on, 1, "dp_shard=1", first, root, "leave")[0]
    assert "a checkpoint in the run's own directory" in text and first in text
    assert ranks.run(goes_on, 2, "tp=2", None, root, "save")[0] == ("none", (str(made), ""))
    assert ranks.run(goes_on, 2, "tp=2", None, root, "leave")[0] == (str(made), (str(made), ""))
    moved = made.rename(tmp_path / "moved")
    assert ranks.run(goes_on, 2, "dp_shard=2", str(moved), root, "leave")[0][0] == str(moved)
    ranks.run(goes_on, 2, "dp_shard=2", str(moved), str(tmp_path / "other"), "save")
    moved.rename(made)
    assert (
        "nothing is there any more" in ranks.run(goes_on, 1, "dp_shard=1", None, str(tmp_path / "other"), "leave")[0][0]
    )
