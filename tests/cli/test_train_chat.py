"""``shardwise train`` on conversations: it learns answers, exports what stock transformers opens, and is resumed exactly."""

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.commands import on_ranks
from models import chat

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.data.order import sample_order
from shardwise.run.metrics import read_metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN = (
    "--data.seq_len=96",
    "--data.global_batch=8",
    "--data.micro_batch=2",
    "--log.every=1",
    "--log.plot=false",
    "--optim.lr=3e-3",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A model directory with the example's tokenizer, and its conversations; of the example's model it has half the blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small")
    example = runpy.run_path(str(EXAMPLES / "small_chat.py"))
    found = example["conversations"](120)
    tokenizer = example["make_tokenizer"]([message["content"] for each in found for message in each["messages"]])
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id, **sizes
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in found))
    return folder


def words(small: Path, dest: Path, *more: str) -> list[str]:
    given = (f"--model.hf={small}", f"--data.path={small / 'chat.jsonl'}", f"--log.dir={dest}")
    keys = {word.partition("=")[0] for word in more}
    return ["train", *given, *(word for word in RUN if word.partition("=")[0] not in keys), *more]


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == kind]


@pytest.mark.soak  # tests/cli/test_train_tokens.py learns answers in each run, and its weights are opened by transformers
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize("pack", ["false", "true"])
def test_it_learns_the_answers_and_stock_transformers_opens_them(ranks, small, tmp_path, pack, layout):
    from transformers import AutoModelForCausalLM

    dest = tmp_path / "run"
    said = on_ranks(
        ranks,
        *words(
            small,
            dest,
            "--train.steps=12",
            "--optim.lr=1e-2",
            f"--data.pack={pack}",
            f"--parallel.layout={layout}",
            "--checkpoint.dtype=fp32",
        ),
        folder=tmp_path,
    )
    assert "120 records" in said and "of them trained on" in said
    before, after = rows(dest, "answer")
    assert before["prompt"] == after["prompt"] and before["text"] != after["text"]
    losses = {row["step"]: row["loss"] for row in rows(dest, "val")}
    assert [*losses] == [0, 12] and losses[12] < 0.6 * losses[0]
    assert [row["perplexity"] for row in rows(dest, "val")] == pytest.approx([math.exp(x) for x in losses.values()])
    assert f"nats/token (perplexity {math.exp(losses[12]):.4g})" in said
    assert "weights stored in bfloat16, trained in float32 (model.cast)" in said
    model = AutoModelForCausalLM.from_pretrained(dest / "weights").eval()
    _, val = sw.SFTDataset(small / "chat.jsonl", str(small), seq_len=96).split(0.1)
    with torch.no_grad():
        samples = [{key: value[None] for key, value in val[i].items()} for i in range(len(val))]
        total = sum(float(sw.next_token_loss(model(sample["input_ids"]), sample)) for sample in samples)
    num = sum(int((sample["labels"] != -100).sum()) for sample in samples)
    assert total / num == pytest.approx(losses[12], rel=1e-5)
    assert (dest / "weights" / "chat_template.jinja").is_file() and "proof" in said


def test_validation_records_of_their_own(ranks, small, tmp_path):
    val = tmp_path / "val.jsonl"
    val.write_text("".join((small / "chat.jsonl").read_text().splitlines(keepends=True)[:5]))
    more = ("--train.steps=1", "--train.prove=false", f"--data.val_path={val}")
    said = on_ranks(ranks, *words(small, tmp_path / "run", *more), folder=tmp_path)
    assert "120 samples to train on, 5 to validate" in said


def test_a_budget_of_tokens_trains_the_windows_of_single_samples(ranks, small, tmp_path):
    more = ("--train.steps=1", "--train.eval_every=0", "--data.micro_tokens=200", "--data.micro_batch=null")
    said = on_ranks(ranks, *words(small, tmp_path / "run", *more, "--parallel.layout=dp_shard=2"), folder=tmp_path)
    assert "proof largest gradient difference" in said
    (row,) = rows(tmp_path / "run", "step")
    train, _ = sw.SFTDataset(small / "chat.jsonl", str(small), seq_len=96).split(0.1)
    first = sample_order(np.arange(8), len(train), seed=0, epoch=0)
    assert row["tokens"] == sum(int((train[int(i)]["labels"] != -100).sum()) for i in first)


@pytest.mark.soak
def test_killed_in_an_epoch_of_packed_records_it_goes_on_under_another_degree(ranks, small, tmp_path):
    """No token twice or missing: each step has the tokens and the loss of a run that was not killed, and kept no tokens, while
    this one reads them from the cache."""
    more = (
        "--train.steps=12",
        "--train.prove=false",
        "--data.pack=true",
        "--checkpoint.every=3",
        "--train.eval_every=0",
        "--data.num_workers=1",
        "--data.global_batch=4",
    )
    none = (*more, "--data.cache=none", "--parallel.layout=dp_shard=2")
    said = on_ranks(ranks, *words(small, tmp_path / "whole", *none), folder=tmp_path)
    assert "tokens " not in said.partition("model ")[0].partition("records ")[0]
    more = (*more, f"--data.cache={tmp_path / 'kept'}")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", *words(small, killed, *more, "--launch.nproc=2")],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 90
        while not (killed / "metrics.jsonl").exists() or len(rows(killed, "step")) < 7:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    time.sleep(1.5)  # ranks end once their launcher is gone
    said = on_ranks(ranks, *words(small, killed, *more, "--parallel.layout=dp_shard=1"), folder=tmp_path, num_ranks=1)
    assert "from step" in said and f"as kept in {tmp_path / 'kept' / 'tokens-'}" in said
    assert len([*(tmp_path / "kept").glob("tokens-*")]) == 1 and not [*(tmp_path / "kept").glob(".*.part")]
    one, other = ({row["step"]: row for row in rows(tmp_path / name, "step")} for name in ("whole", "killed"))
    assert [*one] == [*other] == [*range(1, 13)]
    assert [row["tokens"] for row in one.values()] == [row["tokens"] for row in other.values()]
    assert [row["loss"] for row in one.values()] == pytest.approx([row["loss"] for row in other.values()], rel=1e-4)
    first = int(re.search(r"from step (\d+)", said)[1])
    assert one[first]["epoch"] == one[first + 1]["epoch"] == 0  # in the middle of the first


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no tokenizer": (("--data.path=FOLDER/chat.jsonl",), "without data.tokenizer"),
    "pack of a text": (("--data.path=FOLDER/text.txt", "--data.pack=true"), "so it would have no effect"),
    "unusable of a text": (("--data.unusable=drop",), "so it would have no effect"),
    "line 2": (("--data.path=FOLDER/wrong.jsonl", "--data.tokenizer=FOLDER"), "line 2 of"),
    "val line 2": (
        ("--data.path=FOLDER/chat.jsonl", "--data.tokenizer=FOLDER", "--data.val_path=FOLDER/wrong.jsonl"),
        "line 2 of",
    ),
    "two validations": (
        ("--data.val_path=FOLDER/text.txt", "--data.path=FOLDER/text.txt", "--data.val_fraction=0.2"),
        "remove one",
    ),
    "two kinds": (
        ("--data.path=FOLDER/chat.jsonl", "--data.tokenizer=FOLDER", "--data.val_path=FOLDER/text.txt"),
        "give both as",
    ),
    "no val file": (
        ("--data.path=FOLDER/text.txt", "--data.val_path=FOLDER/other.txt"),
        "there is no such file",
    ),
    "JSONL of another name": (("--data.path=FOLDER/chat.txt",), "name it .jsonl"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_a_rank_starts(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    given, said = REFUSED[name]
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "chat.jsonl").write_text(f"{line}\n")
    (tmp_path / "chat.txt").write_text(f"{line}\n" * 9)
    (tmp_path / "wrong.jsonl").write_text(f"{line}\n{{}}\n")
    (tmp_path / "text.txt").write_text("Hello there. " * 99)
    chat.tokenizer().save_pretrained(tmp_path)
    out = tmp_path / "out"
    status = cli.main(["train", f"--log.dir={out}", *(word.replace("FOLDER", str(tmp_path)) for word in given)])
    told = " ".join(capsys.readouterr().err.split())
    assert status == 2 and said in told and not out.exists()


def test_a_forward_that_lets_packed_records_see_each_other_is_refused(ranks, small, tmp_path):
    (tmp_path / "own.py").write_text(
        "def leaky(model, batch):\n    return model(input_ids=batch['input_ids'], position_ids=batch['position_ids'])\n"
    )
    more = ("--train.steps=1", "--data.pack=true", "--train.forward=own.py:leaky")
    said = on_ranks(ranks, *words(small, tmp_path / "run", *more), folder=tmp_path, status=2)
    assert "its attention goes from one document" in said and "use_cache=False" in said
