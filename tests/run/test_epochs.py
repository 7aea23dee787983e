"""A run of epochs: its steps are those that a Loader makes, and all that depends on their number follows them."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli.commands import on_ranks
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.cli.train import next_commands
from shardwise.errors import ConfigError
from shardwise.run.config import load_config
from shardwise.run.metrics import read_metrics
from shardwise.run.steps import check_steps, steps_left

WORDS = (
    "--data.global_batch=4", "--data.micro_batch=2", "--data.seq_len=16", "--train.eval_every=0", "--log.plot=false",
    "--log.every=1", "--model.args={dim: 16, num_layers: 1, ffn: 16, num_heads: 2}", "--data.path=text.txt",
    "--data.val_fraction=0.2", "--schedule.name=linear", "--checkpoint.every=2", "--train.prove=false",
)  # fmt: skip


def text(folder: Path, num_samples: int = 10) -> None:
    """A text of so many samples to train on, and validation data."""
    (folder / "text.txt").write_text(("some words, " * 40)[: round((16 * num_samples + 1) / 0.8)])


def rows(folder: Path, kind: str = "step") -> dict[int, dict]:
    return {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == kind}


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([0, 0.5, 1, 1.25, 2, 3]), st.integers(0, 60))
def test_steps_are_the_windows_of_a_loader_from_every_position(num_samples, global_batch, epochs, done):
    world = SimpleNamespace(seed=0, device=torch.device("cpu"), axis=lambda name: SimpleNamespace(rank=0, size=1))
    loader = sw.Loader([{"x": 0.0}] * num_samples, world, global_batch=global_batch, micro_batch=1, prepare=None)
    total = steps_left(epochs, num_samples, global_batch)
    assert total == math.ceil(epochs * len(loader))
    taken = 0
    while taken < min(done, total):
        for _ in loader:
            taken += 1
            if taken == min(done, total):
                break
    place = loader.state_dict()
    assert (
        steps_left(epochs, num_samples, global_batch, epoch=place["epoch"], position=place["position"]) == total - taken
    )


def test_a_part_of_an_epoch_is_what_was_written():
    assert steps_left(0.1, num_samples=300, global_batch=10) == 3  # 0.1 * 30 is a little more
    assert steps_left(2.3, num_samples=100, global_batch=10) == 23


def test_a_run_of_epochs_ends_after_them_and_resumes_for_more_in_other_windows(ranks, tmp_path):
    text(tmp_path)
    run = tmp_path / "run"
    words = ("train", *WORDS, f"--log.dir={run}", "--parallel.layout=dp_shard=2")
    said = on_ranks(ranks, *words, "--train.epochs=2", folder=tmp_path)
    assert "2 epochs of 10 samples = 6 steps" in said and "--train.epochs=4" in said
    first = rows(run)
    assert [*first] == [1, 2, 3, 4, 5, 6] and [row["steps"] for row in first.values()] == [6] * 6
    assert [row["tokens"] for row in first.values()] == [64, 64, 32] * 2
    rates = [row["lr"] for row in first.values()]
    assert rates == pytest.approx([3e-3 * (1 - 0.9 * i / 5) for i in range(6)])  # those that each step was taken with
    # As many steps given by number are the same run.
    on_ranks(
        ranks, "train", *WORDS, "--parallel.layout=dp_shard=2", "--train.steps=6", "--log.dir=other", folder=tmp_path
    )
    assert [row["loss"] for row in rows(tmp_path / "other").values()] == [row["loss"] for row in first.values()]
    more = ("--train.epochs=3.5", "--data.global_batch=2")  # windows of 2 samples: 5 in an epoch, and 3 in its half
    said = on_ranks(ranks, *words[:1], *(word for word in words[1:] if "global" not in word), *more, folder=tmp_path)
    assert "3.5 epochs of 10 samples = 14 steps" in said and "train.epochs 2.0 -> 3.5" in said
    assert [*rows(run)] == [*range(1, 15)] and rows(run)[14]["epoch"] == 3
    assert rows(run)[13]["lr"] > rows(run)[14]["lr"] == pytest.approx(0.1 * 3e-3) and rows(run)[14]["steps"] == 14
    again = load_config(run / "config.yaml").config
    assert (again.train.epochs, again.train.steps, again.schedule.warmup_steps) == (3.5, None, None)


def test_no_epochs_train_nothing_and_validate(ranks, tmp_path):
    text(tmp_path)
    said = on_ranks(ranks, "train", *WORDS, "--train.epochs=0", "--log.dir=run", folder=tmp_path)
    assert "0 epochs of 10 samples = 0 steps" in said and "after 0 steps" in said
    assert [*rows(tmp_path / "run", "val")] == [0] and not rows(tmp_path / "run")


def test_epochs_of_a_stream_are_refused(ranks, tmp_path):
    (tmp_path / "own.py").write_text(
        "class Texts:\n    def __iter__(self):\n        import torch\n"
        "        yield from ({'input_ids': torch.arange(17)} for _ in range(8))\n"
    )
    words = [word for word in WORDS if not word.startswith(("--data.path", "--data.seq_len"))]
    said = on_ranks(ranks, "train", *words, "--data.build=own.py:Texts", "--train.epochs=1", folder=tmp_path, status=2)
    assert "train.epochs=1 for own.py:Texts" in said and "it is a stream" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--train.epochs=2", "--train.steps=500"], "train.epochs=2 with train.steps=500"),
        (["--train.epochs=-1"], "a number >= 0"),
        (["--train.epochs=.inf"], "it is not a finite number"),
    ],
)
def test_refused_before_a_rank_starts(capsys, words, told):
    assert cli.main(["train", *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_what_does_not_fit_into_the_steps_of_epochs_is_refused():
    for words, told in (
        (["--schedule.warmup_steps=7"], "warmup_steps=7 with train.epochs=2, 6 steps"),
        (["--train.profile=5:9"], "train.profile=5:9 with train.epochs=2, 6 steps"),
    ):
        config = load_config(None, ["--train.epochs=2", *words]).config
        with pytest.raises(ConfigError) as caught:
            check_steps(config, 6)
        assert told in str(caught.value)
    assert json.dumps(next_commands(Path("a/b"), None, epochs=1.5)).count("--train.epochs=3 ") == 1
