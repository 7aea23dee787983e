"""Damaged and hostile checkpoints: each is refused before anything of the run changes, and no code of theirs is run."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from state.mutant_checkpoints import KINDS, sign
from state.runs import Average, equal, make, run

import shardwise as sw
from shardwise.state.checkpoint.restore import restore
from shardwise.state.checkpoint.saved_run import SavedRun
from shardwise.state.integrity.manifest import MANIFEST
from shardwise.state.source import open_source


@pytest.fixture(scope="module")
def good(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("good")
    ranks.run(run, 2, "dp_shard=2", root, 3, (1, 2), async_save=False, keep=None)
    return root


def outcomes(good: str, place: str, kinds: list[str], num: int, seed: int) -> dict[str, list[str]]:
    """Kind -> what came of each mutant: "refused", or what is wrong."""
    world, model, step = make("dp_shard=1")
    average = Average()
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    with world:
        before = first = _everything(model, step, average)
        for kind in kinds:
            for number in range(num):
                folder = Path(place) / f"{kinds.index(kind)}-{number}" / "step-00000002"
                shutil.copytree(Path(good) / "step-00000002", folder)
                KINDS[kind](random.Random(f"{seed} {kind} {number}"), folder, Path(good) / "step-00000001")
                told = _outcome(folder, model, step, average)
                if not equal(_everything(model, step, average), before):
                    told = f"{number}: {told}, and the run has changed"
                    before = _everything(model, step, average)
                found[kind].append(told)
                if (folder.parent / "mark").exists():
                    found[kind][-1] = f"{number}: code was run"
                shutil.rmtree(folder.parent)
        folder = Path(place) / "step-00000002"
        shutil.copytree(Path(good) / "step-00000002", folder)
        assert _outcome(folder, model, step, average) == "loaded"  # the good one is
        assert not equal(_everything(model, step, average), first)
    return found


def _everything(model, step, average):
    full = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, step.optim)
    return *full, step.state_dict(), average.state_dict(), torch.get_rng_state()


def _outcome(folder, model, step, average) -> str:
    try:
        restore(folder, model, step.optim, {"average": average}, lambda own: step.check_state_dict(own["step"]))
    except sw.CheckpointError as error:
        return "refused" if str(folder) in str(error) else f"refused without naming it: {error}"
    except Exception as error:
        return f"not refused, but failed: {type(error).__name__}: {error}"
    return "loaded"


def check(ranks, good, tmp_path, kinds, num, seed):
    print(f"seed {seed}, {num} of each of {len(kinds)} kinds")
    (found,) = ranks.run(outcomes, 1, str(good), str(tmp_path), kinds, num, seed, timeout_s=1500)
    wrong = {kind: [told for told in results if told != "refused"] for kind, results in found.items()}
    first = {kind: told[:3] for kind, told in wrong.items() if told}
    assert not first, first
    assert {kind: len(results) for kind, results in found.items()} == dict.fromkeys(kinds, num)


def test_a_sample_of_mutants_is_refused(ranks, good, tmp_path):
    check(ranks, good, tmp_path, list(KINDS), 3, 20260)


@pytest.mark.soak
def test_every_mutant_of_many_is_refused(ranks, good, tmp_path):
    check(ranks, good, tmp_path, list(KINDS), 40, random.randrange(1 << 32))


def _forged_buffer(good, folder, entry):
    """A copy of the checkpoint in which the header says another thing of a buffer, with checksums that fit."""
    shutil.copytree(good / "step-00000002", folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["table"] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    sign(folder)


@pytest.mark.parametrize("entry", [{"dtype": "F32"}, {"shape": [5, 1]}, {"dtype": "U8", "shape": [20]}], ids=str)
def test_a_buffer_is_of_the_shape_and_dtype_that_it_was_saved_with(ranks, good, tmp_path, entry):
    folder = tmp_path / "step-00000002"
    _forged_buffer(good, folder, entry)
    (told,) = ranks.run(_loaded, 1, str(folder))
    assert "table is not of the shape and dtype that its state says" in told


def test_a_checkpoint_that_does_not_say_so_is_loaded(ranks, good, tmp_path):
    folder = tmp_path / "step-00000002"
    shutil.copytree(good / "step-00000002", folder)
    content = json.loads((folder / "training" / "state.json").read_text())
    del content["buffers"]
    (folder / "training" / "state.json").write_text(json.dumps(content))
    sign(folder)
    assert ranks.run(_loaded, 1, str(folder)) == ["loaded"]


def _loaded(folder):
    world, model, step = make("dp_shard=1")
    with world:
        try:
            restore(Path(folder), model, step.optim, {"average": Average()})
        except sw.CheckpointError as error:
            return str(error)
    return "loaded"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [MANIFEST, "model.safetensors", "training/state.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(good, tmp_path, name):
    folder = tmp_path / "step-00000002"
    shutil.copytree(good / "step-00000002", folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for read in (SavedRun, open_source):
        with pytest.raises(sw.CheckpointError, match=r"no plain file|no file at all"):
            read(folder)


@pytest.mark.parametrize("victim", ["newest", "all"])
def test_resuming_passes_over_what_cannot_be_read_and_says_so_once(ranks, good, tmp_path, victim):
    root = tmp_path / "run"
    shutil.copytree(good, root, symlinks=True)
    for step in (2,) if victim == "newest" else (1, 2):
        path = root / f"step-{step:08d}" / "training" / "optimizer.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)
    if victim == "all":
        with pytest.raises(sw.RankError, match="none of them can be read"):
            ranks.run(run, 2, "dp_shard=2", str(root), 3, async_save=False)
        return
    found = ranks.run(run, 2, "dp_shard=2", str(root), 3, (2, 3), async_save=False, keep=None)[0]
    assert found["began"] == 1
    (warning,) = found["warnings"]
    assert "resumed from step 1" in warning and "step-00000002/training/optimizer.safetensors" in warning
    again = ranks.run(run, 2, "dp_shard=2", str(root), 3, async_save=False)[0]
    assert again["began"] == 3 and again["warnings"] == []


def test_what_was_passed_over_is_kept_aside_when_it_would_stand_before_a_newer_save(ranks, good, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(good, root, symlinks=True)
    shutil.copytree(root / "step-00000002", root / "step-00000005")  # its manifest is of step 2
    found = ranks.run(run, 2, "dp_shard=2", str(root), 3, (3,), async_save=False, keep=None)[0]
    assert found["began"] == 2 and "its manifest is of step 2" in found["warnings"][0]
    assert sorted(path.name.partition("-0000")[0] for path in root.iterdir() if path.is_dir()) == [
        "damaged-step", "latest", "step", "step", "step",
    ]  # fmt: skip
    assert (root / "step-00000003" / MANIFEST).exists()
