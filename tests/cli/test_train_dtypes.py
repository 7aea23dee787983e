"""The dtype of a model directory, in a run: converted where nothing is lost, and given back in the final weights."""

import json
from pathlib import Path

import pytest
import torch
from cli.commands import on_ranks
from models import chat
from safetensors.torch import load_file

from shardwise.errors import ConfigError
from shardwise.run.config import load_config
from shardwise.run.metrics import read_metrics
from shardwise.run.stored_dtype import dtypes_in

LINE = json.dumps(
    {"messages": [{"role": "user", "content": "what is five ?"}, {"role": "assistant", "content": "five"}]}
)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bf16")
    chat.tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    chat.model(400).to(torch.bfloat16).save_pretrained(folder)
    (folder / "chat.jsonl").write_text(f"{LINE}\n" * 8)
    return folder


def trained(ranks, start: Path, dest: Path, *more: str, **how) -> str:
    words = (
        "--data.seq_len=32",
        "--data.global_batch=4",
        "--data.micro_batch=2",
        "--train.steps=2",
        "--log.plot=false",
        "--train.prove=false",
    )
    given = (f"--model.hf={start}", f"--data.path={start / 'chat.jsonl'}", f"--log.dir={dest}", "--optim.lr=1e-2")
    return on_ranks(ranks, "train", *given, *words, *more, folder=dest.parent, **how)


def test_a_bf16_directory_gives_a_bf16_directory_and_float32_where_it_is_asked_for(ranks, start, tmp_path):
    from transformers import AutoModelForCausalLM

    said = trained(ranks, start, tmp_path / "same")
    assert "weights stored in bfloat16, trained in float32 (model.cast)" in said
    assert f"{tmp_path / 'same' / 'weights'} (weights, safetensors, bfloat16)" in said
    said = trained(ranks, start, tmp_path / "wide", "--checkpoint.dtype=fp32")
    assert "(weights, safetensors, float32)" in said
    same, wide = (
        AutoModelForCausalLM.from_pretrained(tmp_path / n / "weights", dtype="auto") for n in ("same", "wide")
    )
    assert (same.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    for name, dtype in (("same", "bfloat16"), ("wide", "float32")):
        assert json.loads((tmp_path / name / "weights" / "config.json").read_text())["dtype"] == dtype
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(same(tokens).logits, wide.to(torch.bfloat16)(tokens).logits)
    assert not torch.equal(same(tokens).logits, chat.model(400).to(torch.bfloat16)(tokens).logits)
    row = next(row for row in read_metrics(tmp_path / "same" / "metrics.jsonl") if row["kind"] == "weights")
    assert row["dtype"] == "bfloat16"


def test_stored_in_bf16_a_bf16_directory_is_taken_as_it_is(ranks, start, tmp_path):
    said = trained(ranks, start, tmp_path / "run", "--parallel.precision={storage: bf16}")
    assert "trained in" not in said and dtypes_in(tmp_path / "run" / "weights") == {"BF16"}


def test_weights_that_do_not_fit_what_was_changed_are_refused_and_fewer_layers_can_be_asked_for(ranks, start, tmp_path):
    fewer = "--model.args={num_hidden_layers: 1, attn_implementation: eager}"
    said = trained(ranks, start, tmp_path / "run", fewer, status=1)
    assert "changed by model.args={'num_hidden_layers': 1}" in said and "--model.strict=false" in said
    said = trained(ranks, start, tmp_path / "run", "--model.args={hidden_size: 32}", status=1)
    assert "changed by model.args={'hidden_size': 32}" in said
    trained(ranks, start, tmp_path / "run", fewer, "--model.strict=false")
    written = json.loads((tmp_path / "run" / "weights" / "config.json").read_text())
    assert written["num_hidden_layers"] == 1 and not [key for key in written if "attn_impl" in key]


def test_a_value_beyond_the_dtype_of_the_export_does_not_lose_the_weights(ranks, start, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    chat.tokenizer().save_pretrained(tmp_path / "large")
    model.save_pretrained(tmp_path / "large")
    (tmp_path / "large" / "chat.jsonl").write_text(f"{LINE}\n" * 8)
    said = trained(ranks, tmp_path / "large", tmp_path / "run", "--checkpoint.dtype=fp16", status=1)
    assert "model.norm.weight" in said and "were written to" in said
    (kept,) = tmp_path.glob("shardwise-weights-*/model.safetensors")
    assert load_file(kept)["model.norm.weight"].dtype == torch.float32


def test_a_configuration_of_a_run_without_weights_that_says_cast_false_is_read():
    """Such runs wrote it into their config.yaml while it was the default."""
    assert load_config(None, ["model.cast=false"]).config.model.cast is False
    with pytest.raises(ConfigError, match=r"add model\.weights, or remove model\.cast"):
        load_config(None, ["model.cast=true"])
