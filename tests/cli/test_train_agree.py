"""Ranks that another launcher started with different commands: named before training, with every key that differs."""

import os
from pathlib import Path

import pytest
from cli.commands import run_command

from shardwise.cli.train_rank import _facts
from shardwise.run.config import load_config
from shardwise.run.resume_check import OF_A_NODE

TINY = (
    "--model.args={dim: 32, num_layers: 1, ffn: 48}",
    "--data.seq_len=32",
    "--data.val_fraction=0",
    "--train.eval_every=0",
    "--checkpoint.export=null",
    "--log.plot=false",
    "--launch.device=cpu",
)


def start_nodes(ranks, folder: Path, *commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """One rank a command, as a launcher on as many nodes would start them: (exit code, what it wrote) of each."""
    return ranks.run(_on_a_node, len(commands), str(folder), commands, timeout_s=90)


def _on_a_node(folder: str, commands: tuple[tuple[str, ...], ...]) -> tuple[int, str]:
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    code, out, err = run_command(folder, ("train", *TINY, *commands[int(os.environ["RANK"])]))
    return code, out + err


@pytest.mark.timeout(100)
def test_nodes_with_other_overrides_are_named_before_training_with_every_key(ranks, tmp_path):
    (tmp_path / "a.txt").write_text("one two three. " * 40)
    (tmp_path / "b.txt").write_text("one two three! " * 40)
    ours = ("--data.path=a.txt", "--data.global_batch=16", "--optim.lr=1e-3", "--train.steps=3")
    theirs = ("--data.path=b.txt", "--data.global_batch=32", "--optim.lr=2e-3", "--train.steps=4")
    keys = "data.path, data.global_batch, optim.lr, train.steps"
    found = start_nodes(ranks, tmp_path, ours, theirs)
    assert [code for code, _ in found] == [1, 1]
    second, first = sorted((text for _, text in found), key=len)  # the other rank shows it whole
    assert "Traceback" not in first + second
    assert f"RankError: the ranks' configurations differ between ranks: {keys} (shown by rank " in second
    assert f"RankError: the ranks' configurations differ between ranks: {keys}\n" in first
    assert "why: data.path: rank 0: a.txt (600 bytes, sample sha256 " in first
    assert "rank 1: b.txt (600 bytes, sample sha256 " in first
    assert "\n       data.global_batch: rank 0: 16; rank 1: 32\n" in first
    assert "\n       optim.lr: rank 0: 0.001; rank 1: 0.002\n" in first
    assert "\n       train.steps: rank 0: 3; rank 1: 4\n" in first
    assert not (tmp_path / "runs/latest/metrics.jsonl").exists()


@pytest.mark.timeout(100)
def test_nodes_may_have_their_own_folders_and_their_own_copy_of_the_data(ranks, tmp_path):
    commands = []
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "text.txt").write_text("one two three. " * 100)
        folder = (f"--data.path={node}/text.txt", f"--log.dir={node}/run", f"--log.every={len(commands) + 1}")
        commands.append((*folder, "--train.steps=1"))
    results = start_nodes(ranks, tmp_path, *commands)
    assert [code for code, _ in results] == [0, 0], results
    assert (tmp_path / "a/run/metrics.jsonl").exists() and not (tmp_path / "b/run").exists()


def facts(*overrides):
    return _facts(load_config(None, list(overrides)).config)[0]


def test_whether_there_are_weights_to_write_is_compared_and_where_is_not():
    assert facts("--checkpoint.export=a") == facts("--checkpoint.export=b") != facts("--checkpoint.export=null")
    assert facts("--log.dir=a") == facts("--launch.nproc=2") == facts()
    assert facts("--model.args={dim: 8}")["model.args.dim"] == 8


def test_a_folder_of_tokens_is_a_nodes_own(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "tokenizer.json").write_text("{}")
    data = (f"--data.path={tmp_path}/x.txt", f"--data.tokenizer={tmp_path}")
    assert facts(*data, "--data.cache=a") == facts(*data, "--data.cache=none") == facts(*data)


def test_a_model_is_compared_by_its_configuration_and_not_by_its_path(tmp_path):
    for name, text in (("a", '{"n": 1}'), ("b", '{"n": 1}'), ("c", '{"n": 2}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
        (tmp_path / name / "tokenizer.json").write_text("{}")
    (tmp_path / "x.txt").write_text("text")
    data = (f"--data.path={tmp_path}/x.txt", "--data.tokenizer=hf")
    first, copy, other = (facts(f"--model.hf={tmp_path}/{name}", *data) for name in "abc")
    assert first == copy
    assert {key for key in first if first[key] != other[key]} == {"model.hf"}
    before = _facts(load_config(None, [f"--model.hf={tmp_path}/c", *data]).config)
    (tmp_path / "c" / "config.json").write_text('{"n": 1}')
    after, shown = _facts(load_config(None, [f"--model.hf={tmp_path}/c", *data]).config)
    assert before[0] != after == first
    assert shown["model.hf"].startswith(f"{tmp_path}/c (8 bytes, sample sha256 ")


def test_the_text_that_comes_with_python_is_compared_too():
    found, shown = _facts(load_config(None, []).config)
    assert found["data.path"] == shown["data.path"] and found["data.path"].startswith("Python's help topics, ")


def test_keys_of_a_node_are_those_that_may_differ_between_nodes():
    assert not [key for key in facts() if key.startswith(OF_A_NODE)]
    assert facts("--checkpoint.every=5") != facts("--checkpoint.every=6")
    assert facts("--optim.groups={lm_head.*: {lr: 1e-4}}")["optim.groups"] == {"lm_head.*": {"lr": 1e-4}}
