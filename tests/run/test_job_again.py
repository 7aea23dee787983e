"""A run that is started again in its folder: with fewer steps than it has done, and anew where its checkpoints lie elsewhere."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import shardwise as sw
from shardwise.run import job, output
from shardwise.run.config import load_config

TINY = (
    "--model.args={dim: 32, num_layers: 1, ffn: 48}", "--data.seq_len=32", "--data.val_fraction=0", "--train.eval_every=0",
    "--log.plot=false", "--launch.device=cpu", "--checkpoint.every=1",
)  # fmt: skip


def train(folder, steps, *words):
    config = load_config(None, [*TINY, f"--log.dir={folder}", f"--train.steps={steps}", *words]).config
    with sw.init("dp_shard=2", device="cpu", timeout_s=30) as world:
        try:
            return job.train(config, world, lambda kind, **fields: None)
        except sw.ShardwiseError as error:
            return f"{type(error).__name__}: {error.given}: {error.why}"


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_a_run_that_has_done_more_steps_than_it_is_asked_for_says_how_many(ranks, tmp_path):
    first = ranks.run(train, 2, tmp_path, 3)[0]
    again = ranks.run(train, 2, tmp_path, 2)[0]
    assert first["steps"] == again["steps"] == 3 and first["loss"] == again["loss"]
    assert kept(tmp_path / "checkpoints") == [1, 2, 3]


@pytest.fixture
def linked(tmp_path):
    """A run's folder, whose checkpoints are a link to another place."""
    (tmp_path / "disk/mine").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk/mine")
    return tmp_path


def test_a_run_that_starts_anew_goes_on_using_the_disk_that_its_checkpoints_are_linked_to(ranks, linked):
    folder, disk = linked / "run", linked / "disk"
    ranks.run(train, 2, folder, 2)
    for number, steps in ((1, 3), (2, 1)):
        ranks.run(train, 2, folder, steps, "--checkpoint.resume=false")
        assert (folder / "checkpoints").is_symlink() and kept(disk / "mine") == list(range(1, steps + 1))
        assert kept(disk / f"mine.previous-{number}") == ([1, 2], [1, 2, 3])[number - 1]
    assert [path.name for path in folder.glob("checkpoints*")] == ["checkpoints"]


def refused(folder):
    patch = pytest.MonkeyPatch()

    def rename(source, dest):
        raise OSError(16, "Device or resource busy")

    patch.setattr("shardwise.run.checkpoints.os.rename", rename)
    try:
        return train(folder, 1, "--checkpoint.resume=false")
    finally:
        patch.undo()


def test_checkpoints_that_cannot_be_moved_aside_are_told_and_stay(ranks, linked):
    ranks.run(train, 2, linked / "run", 2)
    for told in ranks.run(refused, 2, linked / "run"):
        assert "cannot be moved aside, to" in told and "Device or resource busy" in told
        assert told.startswith(f"CheckpointError: the older checkpoints in {linked}/disk/mine: ")
    assert kept(linked / "disk/mine") == [1, 2]


def weights(folder: Path) -> bytes | None:
    file = folder / "model.safetensors"
    return file.read_bytes() if file.exists() else None


def test_weights_of_an_older_run_are_kept_once_and_those_of_a_resumed_run_replace_its_own(ranks, tmp_path):
    own, older = tmp_path / "weights", tmp_path / "weights.previous"
    ranks.run(train, 2, tmp_path, 1)
    first = weights(own)
    assert weights(older) is None
    ranks.run(train, 2, tmp_path, 2)  # resumes
    second = weights(own)
    assert second != first and weights(older) is None
    ranks.run(train, 2, tmp_path, 1, "--checkpoint.resume=false", "--optim.lr=0.02")
    third = weights(own)
    assert third not in (first, second) and weights(older) == second
    ranks.run(train, 2, tmp_path, 2, "--optim.lr=0.02")  # resumes
    assert weights(own) != third and weights(older) == second
    last = weights(own)
    ranks.run(train, 2, tmp_path, 1, "--checkpoint.resume=false", "--optim.lr=0.05")
    assert weights(older) == last


def saved_before_weights(folder):
    """A run that ends after its last checkpoint, before its weights are written."""
    patch = pytest.MonkeyPatch()

    def fail(*_, **__):
        raise sw.RankError("the weights", why="this test ends the run", fix="none")

    patch.setattr(output, "save_weights", fail)
    try:
        return train(folder, 1, "--checkpoint.resume=false", "--optim.lr=0.02")
    finally:
        patch.undo()


def test_weights_of_an_older_run_outlive_a_run_that_is_stopped_and_resumed(ranks, tmp_path):
    ranks.run(train, 2, tmp_path, 1)
    first = weights(tmp_path / "weights")
    for told in ranks.run(saved_before_weights, 2, tmp_path):
        assert "this test ends the run" in told
    assert weights(tmp_path / "weights") == weights(tmp_path / "weights.previous") == first
    ranks.run(train, 2, tmp_path, 1, "--optim.lr=0.02")  # resumes, and cannot know whose weights these are
    assert weights(tmp_path / "weights") != first and weights(tmp_path / "weights.previous") == first


def test_a_run_whose_checkpoints_are_without_the_frozen_base_resumes_beside_it(ranks, tmp_path):
    ranks.run(train, 2, tmp_path / "base", 1)
    words = (f"--model.weights={tmp_path / 'base/weights'}", "--parallel.lora.rank=2", "--checkpoint.frozen=leave")
    found = []
    for folder, given in (("run", words), ("whole", words[:2])):
        for steps in (2, 4):  # whose schedules differ
            last = ranks.run(train, 2, tmp_path / folder, steps, *given)[0]
        found.append(last["loss"])
        is_without = (tmp_path / folder / "checkpoints/step-00000002/training/frozen.json").is_file()
        assert last["steps"] == 4 and is_without == (folder == "run")
    assert found[0] == found[1]
    without = ranks.run(train, 2, tmp_path / "run", 5, *words[1:])[0]
    assert "a checkpoint beside another base" in without


def test_a_run_of_a_model_that_its_code_has_wrapped_by_peft_writes_adapters_and_merged_weights(ranks, tmp_path):
    pytest.importorskip("peft")
    build = f"--model.build={Path(__file__).parents[1] / 'techniques/lora/wrapped.py'}:for_a_run"
    assert "loaded from no directory" in ranks.run(train, 2, tmp_path, 1, build, "--checkpoint.frozen=leave")[0]
    assert ranks.run(train, 2, tmp_path, 1, build)[0]["steps"] == 1
    assert (tmp_path / "adapter/adapter_config.json").is_file()
    names = load_file(tmp_path / "weights/model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in names and not any("lora" in name for name in names)
