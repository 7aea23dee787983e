"""Weights of an older run in the folder of a new one: kept once, before anything can happen to them."""

import os
import shutil
from pathlib import Path

import pytest

from shardwise.errors import CheckpointError
from shardwise.run.older_weights import keep_older


def make(folder: Path, what: str) -> Path:
    """A model of one file in ``folder``, put there as a save does: another folder under the same name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(what)
    (folder / "config.json").write_text(f"config of {what}")
    return folder


def text(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def test_the_last_older_weights_are_kept_and_the_others_stay_where_they_are(tmp_path):
    weights = make(tmp_path / "weights", "first")
    (weights / "notes.md").write_text("of the user, which a save leaves there")
    for before, now in (("first", "second"), ("second", "third")):
        place = keep_older(weights, "weights", {})
        assert place == tmp_path / "weights.previous" and text(weights) == text(place) == before
        assert os.path.samefile(place / "model.safetensors", weights / "model.safetensors")  # no space is used
        make(weights, now)
        assert text(place) == before and (place / "config.json").read_text() == f"config of {before}"
        assert not (place / "notes.md").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights", "weights.previous"]


def test_nothing_is_kept_where_there_are_no_weights_or_they_are_a_link(tmp_path):
    previous = make(tmp_path / "weights.previous", "older")
    (tmp_path / "weights").mkdir()
    assert keep_older(tmp_path / "none", "weights", {}) is None
    assert keep_older(tmp_path / "weights", "weights", {}) is None  # a run that was stopped: what is kept stays
    (tmp_path / "link").symlink_to(make(tmp_path / "disk", "elsewhere"))
    assert keep_older(tmp_path / "link", "weights", {}) is None
    assert text(previous) == "older" and not (tmp_path / "link.previous").exists()


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert text(keep_older(make(tmp_path / "weights", "first"), "weights", {})) == "first"


def test_weights_that_cannot_be_kept_leave_all_as_it_was(tmp_path, monkeypatch):
    weights, previous = make(tmp_path / "weights", "first"), make(tmp_path / "weights.previous", "older")

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copy2", refuse)
    with pytest.raises(OSError, match="No space"):
        keep_older(weights, "weights", {})
    assert text(weights) == "first" and text(previous) == "older" and len(list(tmp_path.iterdir())) == 2


def test_those_that_the_run_starts_from_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights, previous = make(tmp_path / "weights", "first"), make(tmp_path / "weights.previous", "older")
    with pytest.raises(CheckpointError, match=r"model.hf='weights.previous' in a run that writes to .*/weights"):
        keep_older(weights, "weights", {"model.weights": None, "model.hf": "weights.previous"})
    assert text(weights) == "first" and text(previous) == "older"
    assert keep_older(weights, "weights", {"model.hf": "weights"}) == previous
