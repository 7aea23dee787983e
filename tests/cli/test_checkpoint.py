"""``shardwise checkpoint``: what lies in a directory of checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
from state.runs import run

from shardwise.cli import main as cli
from shardwise.launch.lock import try_lock


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks.run(run, 2, "dp_shard=2", root, 4, (1, 2, 3, 4), async_save=False, keep=None)
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def damage(root: Path, step: int, name: str = "model.safetensors") -> None:
    path = root / f"step-{step:08d}" / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def say(capsys, *words, status=0):
    assert cli.main(["checkpoint", *map(str, words)]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 or not captured.err else captured.out + captured.err


def test_ls_names_each_and_what_is_wrong_with_it(root, capsys):
    (root / "step-00000002" / "manifest.json").unlink()
    lines = say(capsys, "ls", root).splitlines()
    assert len(lines) == 5 and lines[0].split()[0] == "step"
    assert [line.split()[0] for line in lines[1:]] == ["1", "step-00000002", "3", "4"]
    assert "it was never finished" in lines[2] and lines[1].split()[-1] == "dp_shard=2"
    rows = json.loads(say(capsys, "ls", root, "--json"))
    assert [row["problem"] is None for row in rows] == [True, False, True, True]
    assert rows[0]["optimizer"] == "AdamW" and rows[0]["extra"] == ["average"] and rows[0]["data"]["position"] == 12


@pytest.mark.parametrize("action", ["ls", "show", "verify", "prune"])
def test_the_folder_of_a_run_stands_for_the_checkpoints_in_it(root, capsys, action):
    words = ["--keep", "1"] if action == "prune" else []
    root.rename(root.parent / "checkpoints")  # as shardwise train keeps them
    (root.parent / "metrics.jsonl").write_text("")
    told = say(capsys, action, root.parent, *words)
    left = sorted(path.name for path in (root.parent / "checkpoints").glob("step-*"))
    if action == "prune":
        assert str(root.parent / "checkpoints" / "step-00000003") in told and left == ["step-00000004"]
    else:
        assert len(left) == 4
        assert told == say(capsys, action, root.parent / "checkpoints")


def test_the_folder_of_a_run_is_not_pruned_while_it_goes_on(root, capsys):
    checkpoints = root.rename(root.parent / "checkpoints")
    held = try_lock(checkpoints / ".lock").held
    with held:
        told = say(capsys, "prune", root.parent, "--keep", "1", status=1)
    assert "a run is using them" in told and len(list(checkpoints.glob("step-*"))) == 4


def test_weights_of_the_folder_of_a_run_are_not_guessed(root, capsys):
    root.rename(root.parent / "checkpoints")
    assert cli.main(["convert", str(root.parent), f"{root.parent}-out"]) == 1
    assert f"name {root.parent / 'checkpoints'}" in capsys.readouterr().err


def test_show_tells_what_is_in_one_and_the_newest_of_a_directory(root, capsys):
    text = say(capsys, "show", root)
    assert text.splitlines()[0].endswith("step-00000004")
    for told in (
        "dp_shard=2 (2 ranks)",
        "AdamW",
        "epoch 1, sample 0 of 40",
        "average",
        "training/optimizer.safetensors",
    ):
        assert told in text, told
    assert "step-00000001" in say(capsys, "show", root / "step-00000001")
    assert json.loads(say(capsys, "show", root / "latest", "--json"))["step"] == 4


def test_verify_reads_every_byte(root, capsys):
    assert say(capsys, "verify", root).count("whole:") == 4
    damage(root, 3)
    text = say(capsys, "verify", root, status=1)
    assert text.count("whole:") == 3 and "step-00000003  DAMAGED" in text and "model.safetensors" in text
    assert "whole" in say(capsys, "verify", root / "step-00000004")


def test_prune_keeps_what_it_is_told_and_counts_only_what_is_whole(root, capsys):
    def kept():
        return [int(path.name[5:]) for path in sorted(root.glob("step-*"))]

    text = say(capsys, "prune", root, "--keep", 1, "--dry-run")
    assert text.count("would remove") == 3 and kept() == [1, 2, 3, 4]
    (root / "step-00000004" / "training" / "state.json").unlink()
    assert "2 of 4 stay" in say(capsys, "prune", root, "--keep", 1)
    assert kept() == [3, 4]  # the newest is not whole: the one before it stays
    held = try_lock(root / ".lock").held
    assert "a run is using them" in say(capsys, "prune", root, "--keep", 1, status=1)
    held.close()


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("ls", "nowhere"), 2, "no such directory"),
        (("ls", "."), 1, "no checkpoint in it"),
        (("list", "."), 2, "invalid choice"),
        (("ls", ".", "--keep", "3"), 2, "what prune removes"),
        (("prune", "."), 2, "without --keep"),
        (("prune", "run", "--keep", "0"), 2, "keep=0"),
        (("prune", "run/step-00000001", "--keep", "1"), 2, "that is one checkpoint"),
        (("prune", "run", "--keep", "1", "--json"), 2, "paths only"),
    ],
)
def test_mistakes_are_told(root, capsys, monkeypatch, words, status, told):
    monkeypatch.chdir(root.parent)
    assert told in say(capsys, *words, status=status)
    assert len(list(root.glob("step-*"))) == 4


def test_checkpoints_that_stay_are_not_said_to_be_gone(root, capsys, monkeypatch):
    """In a directory of another user's: the lock cannot be made, or a checkpoint not be moved."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        told = say(capsys, "prune", root, "--keep", 3, status=1)
    assert "step-00000001 is still there" in told and "removed /" not in told
    (root / ".lock").unlink(missing_ok=True)
    (root / ".lock").mkdir()
    told = say(capsys, "prune", root, "--keep", 3, status=1)
    assert "nothing can be removed there: Is a directory" in told and "Traceback" not in told
    assert len([*root.glob("step-*")]) == 4
