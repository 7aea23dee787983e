"""Checkpoints as what is converted, and as what it is converted to: no byte is believed that its checksum does not fit."""

import json
import os
import random
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from models.drops import Drops
from safetensors.torch import load_file
from state.good_sources import Good, make_good
from state.runs import EVERY, equal, make
from state.sources import loaded, same_bytes
from state.test_checkpoint_average import averaged

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.config.conversion import Conversion
from shardwise.state import block_copy
from shardwise.state.convert import convert
from shardwise.state.integrity import sums
from shardwise.state.source import open_source


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Good:
    return make_good(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[Path, dict]:
    """A run's directory with the checkpoints of steps 2 and 3, and its last state."""
    root = tmp_path_factory.mktemp("run")
    return root, ranks.run(averaged, 2, "dp_shard=2", root, 3, (2, 3), keep=None)[0]


def flipped(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# ---- from a checkpoint ----------------------------------------------------------------------------------------------

PLACES = ("", "latest", "step-00000003", "step-00000003/model.safetensors", "step-00000003/extra/ema")


@pytest.mark.parametrize("place", PLACES, ids=["run", "latest", "one", "file", "average"])
def test_weights_of_a_run_are_converted_from_wherever_they_are_named(saved, tmp_path, capsys, place):
    root, run = saved
    expected = run["last"] if "ema" in place else run["run"][0]
    assert cli.main(["convert", str(root / place), str(tmp_path / "out"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a checkpoint ") and "every tensor compared with the source: equal" in printed
    assert ("left out: training: training state is not a weight" in printed) == (place in PLACES[:3])
    assert ("left out: extra/ema: weights of another model" in printed) == (place in PLACES[:3])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found and all(same_bytes(found[name], expected[name]) for name in found)
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors"]  # no manifest, nothing of the run


@pytest.mark.parametrize("place", PLACES, ids=["run", "latest", "one", "file", "average"])
@pytest.mark.parametrize("where", ["value", "header", "config", "manifest"])
def test_a_flipped_bit_is_refused_and_nothing_is_written(saved, tmp_path, capsys, place, where):
    root = tmp_path / "run"
    shutil.copytree(saved[0], root, symlinks=True)
    folder = root / "step-00000003"
    weights = folder / place.partition("/")[2] if "extra" in place else folder
    if where == "manifest":
        flipped(folder / "manifest.json", random.Random(place).randrange((folder / "manifest.json").stat().st_size))
    elif where == "config":
        (weights / "config.json").write_text("{}")  # that nobody has summed
    else:
        flipped(weights / "model.safetensors", -3 if where == "value" else 20)
    assert cli.main(["convert", str(root / place), str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert str(folder) in told and "nothing of it was loaded" in told
    assert os.listdir(tmp_path) == ["run"]


def test_the_newest_is_the_greatest_step_and_what_looks_like_one_is_not(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "run", symlinks=True)
    os.utime(tmp_path / "run" / "step-00000002")  # the latest by the clock
    (tmp_path / "run" / "step-9").mkdir()
    assert open_source(tmp_path / "run").place.endswith("step-00000003")
    (tmp_path / "run" / "step-00000003" / "manifest.json").unlink()
    with pytest.raises(sw.CheckpointError, match="never finished"):
        open_source(tmp_path / "run")


def test_a_manifest_of_somebody_else_makes_no_checkpoint(good, tmp_path):
    shutil.copytree(good.folder, tmp_path / "hf")
    (tmp_path / "hf" / "manifest.json").write_text('{"name": "an app", "icons": []}')
    source = open_source(tmp_path / "hf")
    assert source.kind == "a Hugging Face directory" and source.verified is None
    (tmp_path / "hf").rename(tmp_path / "step-1")
    assert open_source(tmp_path / "step-1").verified is None


# ---- to a checkpoint ------------------------------------------------------------------------------------------------


def test_weights_go_to_a_checkpoint_and_back_with_what_lies_beside_them(good, tmp_path, capsys):
    shutil.copytree(good.folder, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "none"}')
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    there, back = tmp_path / "step-00000007", tmp_path / "back"
    words = ["convert", str(tmp_path / "hf"), str(there), "--to", "shardwise", "--verify", "--max-shard-bytes", "150"]
    assert cli.main(words) == 0
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "plain"), *words[5:]]) == 0
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted([*names, "manifest.json"]) == sorted(path.name for path in there.iterdir())
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(names)
    for name in names:  # the manifest is all that it has more
        assert (there / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert cli.main(["convert", str(there), str(back), *words[5:]]) == 0
    assert sorted(path.name for path in back.iterdir()) == names
    found = loaded(open_source(back))
    assert set(found) == set(good.tensors) and all(same_bytes(found[n], t) for n, t in good.tensors.items())
    capsys.readouterr()


def test_the_commands_for_checkpoints_know_one_of_weights_only(good, tmp_path, capsys):
    dest = tmp_path / "runs" / "step-00000007"
    convert(Conversion(source=good.file, dest=dest, to="shardwise"))
    assert cli.main(["checkpoint", "ls", str(dest.parent)]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[:2] == ["7", "-"] and row.endswith("weights only")
    assert cli.main(["checkpoint", "show", str(dest)]) == 0
    printed = capsys.readouterr().out
    assert "weights only, and no run can resume from it" in printed and "model.safetensors" in printed
    assert cli.main(["checkpoint", "verify", str(dest)]) == 0
    flipped(dest / "model.safetensors", -2)
    assert cli.main(["checkpoint", "verify", str(dest)]) == 1
    assert "step-00000007  DAMAGED" in capsys.readouterr().out


def test_the_step_of_a_checkpoint_goes_along(saved, tmp_path):
    root, run = saved
    for source, dest, step in ((root, "averaged", 3), (root / "step-00000002", "step-00000009", 9)):
        convert(Conversion(source=source, dest=tmp_path / dest, to="shardwise", dtype="bf16"))
        text = json.loads((tmp_path / dest / "manifest.json").read_text())
        assert text["step"] == step and "training/state.json" not in text["files"]
    found = loaded(open_source(tmp_path / "averaged"))
    assert all(torch.equal(value, run["run"][0][name].bfloat16()) for name, value in found.items() if name != "table")


def begun(layout, weights, root):
    """What comes of resuming from weights, and what is loaded from them."""
    world, model, step = make(layout)
    with world:
        other = sw.parallelize(Drops().double(), world, sharding=EVERY)
        try:
            sw.load_weights(other, weights)
            found = sw.full_state_dict(other)
        except sw.CheckpointError as error:
            found = str(error)
        before = sw.full_state_dict(model)
        try:
            with sw.CheckpointManager(root, step) as manager:
                manager.load()
        except sw.CheckpointError as error:
            assert equal(before, sw.full_state_dict(model)) and step.num_steps == 0
            return found, str(error)
    return found, None


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_run_begins_with_converted_weights_and_does_not_resume_from_them(ranks, saved, tmp_path, layout):
    root, run = saved
    folder = tmp_path / "runs" / "step-00000003"
    convert(Conversion(source=root, dest=folder, to="shardwise"))
    for found, error in ranks.run(begun, 2, layout, folder, folder.parent):
        assert not found or equal(found, run["run"][0])
        assert "holds weights only" in error and f"sw.load_weights(model, '{folder}')" in error
        assert "none of them can be read" not in error  # it is not damaged
    flipped(folder / "model.safetensors", -3)
    for found, _ in ranks.run(begun, 2, layout, folder, folder.parent):
        assert "are not what was written there" in found


def test_checksums_fit_blocks_that_hold_the_ends_of_several_tensors(tmp_path):
    state = {f"t{i}": torch.randn(70_001 + i) for i in range(5)}
    torch.save(state, tmp_path / "source.pt")
    with patch.object(block_copy, "BUFFER", 100_000):
        convert(Conversion(source=tmp_path / "source.pt", dest=tmp_path / "out", to="shardwise"))
    assert cli.main(["checkpoint", "verify", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bytes(value, state[name]) for name, value in found.items())


def test_a_converted_checkpoint_may_be_replaced_and_a_run_may_not(saved, good, tmp_path):
    dest = tmp_path / "out"
    for source in (good.file, good.dcp):
        convert(Conversion(source=source, dest=dest, to="shardwise", overwrite=True))
    shutil.copytree(saved[0] / "step-00000003", tmp_path / "step-00000003")
    with pytest.raises(sw.CheckpointError, match="is no part of weights"):
        convert(Conversion(source=good.file, dest=tmp_path / "step-00000003", to="shardwise", overwrite=True))
    shutil.copytree(good.folder, tmp_path / "hf")
    (tmp_path / "hf" / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(sw.CheckpointError, match=r"manifest\.json in it is no part of weights"):
        convert(Conversion(source=good.file, dest=tmp_path / "hf", overwrite=True))


def wide(layout, path, act):
    """A model of several blocks is saved to, or loaded from, a directory; the error of it."""
    world, model, _ = make(layout, dim=200)
    with world:
        try:
            getattr(sw, act)(model, path)
        except sw.CheckpointError as error:
            return str(error)
    return None


def test_a_flipped_bit_in_any_block_is_refused_where_it_is_read(ranks, tmp_path):
    ranks.run(wide, 2, "dp_shard=2", tmp_path / "hf", "save_weights")
    convert(Conversion(source=tmp_path / "hf", dest=tmp_path / "whole", to="shardwise"))
    assert ranks.run(wide, 2, "dp_shard=2", tmp_path / "whole", "load_weights") == [None, None]
    size = (tmp_path / "whole" / "model.safetensors").stat().st_size
    assert size > 3 * sums.BLOCK
    for block in range(1, size // sums.BLOCK + 1):
        folder = tmp_path / f"damaged-{block}"
        shutil.copytree(tmp_path / "whole", folder)
        flipped(folder / "model.safetensors", min(size, (block + 1) * sums.BLOCK) - 1)
        if block in (1, size // sums.BLOCK):
            for error in ranks.run(wide, 2, "dp_shard=2", folder, "load_weights"):
                assert f"its bytes from {block * sums.BLOCK} on are not what was written there" in error
        with pytest.raises(sw.CheckpointError, match=f"its bytes from {block * sums.BLOCK} on"):
            convert(Conversion(source=folder, dest=tmp_path / "out"))
        assert not (tmp_path / "out").exists()
