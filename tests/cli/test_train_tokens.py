"""``shardwise train`` with tokens that the model directory does not have: learned, resumed, exported, and opened by transformers."""

import json
import math
from pathlib import Path

import pytest
import torch
from cli.commands import on_ranks
from models import chat

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.run.metrics import read_metrics

TEMPLATE = chat.CHATML.replace("im_start", "turn").replace("im_end", "end")
RUN = (
    "--data.seq_len=48",
    "--data.global_batch=4",
    "--data.micro_batch=2",
    "--log.plot=false",
    "--optim.lr=3e-2",
    "--checkpoint.every=6",
    "--checkpoint.dtype=fp32",
    "--data.chat_template=turns.jinja",
    "--data.eos_token=<|end|>",
)
TOKENS = "--model.add_tokens=<|turn|>,<|end|>,<s>"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base model: without a chat template, without tokens for turns; and conversations."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = chat.tokenizer(None, eos="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    chat.model(len(tokenizer), tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(folder)
    (folder / "turns.jinja").write_text(TEMPLATE)
    lines = [
        [{"role": "user", "content": f"what is {i} ?"}, {"role": "assistant", "content": "thank you"}]
        for i in range(24)
    ]
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps({'messages': line})}\n" for line in lines))
    return folder


def trained(ranks, base: Path, dest: Path, *more: str, **how) -> str:
    given = (f"--model.hf={base}", f"--data.path={base / 'chat.jsonl'}", f"--log.dir={dest}")
    keys = {word.partition("=")[0] for word in more}
    kept = [word for word in RUN if word.partition("=")[0] not in keys]
    return on_ranks(ranks, "train", *given, *kept, *more, folder=base, **how)


def test_added_tokens_are_learned_resumed_under_another_layout_and_exported(ranks, base, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dest = tmp_path / "run"
    said = trained(ranks, base, dest, TOKENS, "--train.steps=6", "--parallel.layout=dp_shard=2")
    assert "vocab added <|turn|>, <|end|>; <s> was there; 342 rows became 344" in said
    assert "proof largest gradient difference" in said
    said = trained(ranks, base, dest, TOKENS, "--train.steps=36", "--parallel.layout=tp=2")
    assert "from step 6" in said and "proof largest gradient difference" in said
    losses = {row["step"]: row["loss"] for row in read_metrics(dest / "metrics.jsonl") if row["kind"] == "val"}
    assert [*losses] == [0, 6, 36] and losses[36] < 0.1 * losses[0]

    tokenizer, model = (kind.from_pretrained(dest / "weights") for kind in (AutoTokenizer, AutoModelForCausalLM))
    assert len(tokenizer) == model.config.vocab_size == len(model.get_input_embeddings().weight) == 344
    ends = (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    assert ends == (343, 343, 343) and tokenizer.chat_template == TEMPLATE
    _, val = sw.SFTDataset(base / "chat.jsonl", tokenizer, seq_len=48).split(0.1)
    samples = [{key: value[None] for key, value in val[i].items()} for i in range(len(val))]
    assert all((sample["input_ids"] == 342).any() for sample in samples)
    with torch.no_grad():
        total = sum(float(sw.next_token_loss(model(sample["input_ids"]), sample)) for sample in samples)
    num = sum(int((sample["labels"] != -100).sum()) for sample in samples)
    assert math.isclose(total / num, losses[36], rel_tol=1e-5)

    capsys.readouterr()
    for folder in (dest / "weights", dest / "checkpoints" / "latest"):
        assert cli.main(["generate", str(folder), "--prompt", "what is 3 ?", "--max-tokens", "20"]) == 0
        out, err = capsys.readouterr()
        assert "thank you" in out and "<|end|>" not in out and "ended by '<|end|>'" in err

    (base / "other.jinja").write_text(TEMPLATE.replace("role'] + ", "role'] + ':' + "))
    for change, key in (
        ("--model.add_tokens=<|turn|>,<|end|>", "model.add_tokens"),
        ("--data.chat_template=other.jinja", "data.chat_template"),
    ):
        words = [change] if key == "model.add_tokens" else [TOKENS, change]
        said = trained(ranks, base, dest, *words, "--train.steps=70", status=2)
        assert f"ConfigError: {key}: not as in the run" in said and "--fresh" in said


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused_and_mended_by_the_option_it_names(
    ranks, base, tmp_path
):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "larger")
    more = (
        f"--data.tokenizer={tmp_path / 'larger'}",
        "--train.steps=2",
        "--data.chat_template=null",
        "--data.eos_token=null",
    )
    said = trained(ranks, base, tmp_path / "run", *more, status=2)
    assert "the model's vocabulary has 342 tokens" in said and "--model.vocab=tokenizer" in said
    said = trained(ranks, base, tmp_path / "run", *more, "--model.vocab=tokenizer", "--train.prove=false", num_ranks=1)
    assert "vocab 342 rows became 344" in said
    weights = tmp_path / "run" / "weights"
    assert (
        len(AutoTokenizer.from_pretrained(weights))
        == json.loads((weights / "config.json").read_text())["vocab_size"]
        == 344
    )
