"""``data.seq_len`` beyond a model's table of positions, and quantised directories: refused before a process group starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.commands import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.run.config import load_config
from shardwise.run.positions_trial import most_positions

HERE = Path(__file__)
ROOT = HERE.parents[2]


class Short(nn.Module):
    """A model of ``num`` positions, looked up in the way that ``how`` names."""

    def __init__(self, how: str = "embedding", num: int = 32) -> None:
        super().__init__()
        self.how, self.num = how, num
        self.tokens, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.table = nn.Embedding(num + 2, 16) if how == "offset" else nn.Embedding(num, 16)
        self.register_buffer("ids", torch.arange(num)[None], persistent=False)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        x = self.tokens(input_ids)
        if self.how == "slice":
            x = x + self.table.weight[None, :length]
        elif self.how == "index":
            x = x + self.table.weight[places.expand(1, -1)]
        elif self.how == "buffer":
            x = x + self.table(self.ids[:, :length])
        elif self.how == "offset":
            x = x + self.table((places + 2).unsqueeze(0))
        elif self.how == "assert":
            assert length <= self.num, f"a sequence of {length}"
        elif self.how == "value":
            x = x + self.table(places[None]) if length < 2 or bool((input_ids >= 0).all()) else x
        elif self.how != "none":
            x = x + self.table(places.long().view(1, -1))
        return self.head(torch.tanh(x))


@pytest.mark.parametrize("how", ["embedding", "slice", "index", "buffer", "offset", "assert"])
def test_positions_are_counted_without_values(how):
    with torch.device("meta"):
        model = Short(how)
    assert most_positions(model, 33) == most_positions(model, 64) == most_positions(model, 1000) == 32
    assert most_positions(model, 32) is None and most_positions(model, 5) is None


@pytest.mark.parametrize("how", ["none", "value"])
def test_what_does_not_show_is_not_refused(how):
    """A model without a table; one that looks at values, which meta has not: its shorter runs prove nothing."""
    with torch.device("meta"):
        model = Short(how)
    assert most_positions(model, 64) is None


def train(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "train",
        "--train.steps=1",
        "--train.prove=false",
        "--no-config",
        *overrides,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_of_samples_that_are_too_long_is_refused_and_its_fix_runs(ranks, tmp_path):
    words = ["--train.steps=1", "--train.prove=false", "--log.plot=false", f"--model.build={HERE}:Short"]
    words += [f"--data.path={ROOT / 'README.md'}", f"--log.dir={tmp_path}/a"]
    told = on_ranks(ranks, "train", *words, "--data.seq_len=64", folder=tmp_path, num_ranks=1, status=2)
    assert f"data.seq_len=64 with model.build='{HERE}:Short', which has 32 positions" in told
    assert "--data.seq_len=32 or less" in told
    on_ranks(ranks, "train", *words, "--data.seq_len=32", folder=tmp_path, num_ranks=1)


def folder_of(path, **changes):
    """A model directory with a learned table of 32 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(path)
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("records", [False, True])
def test_a_directory_shows_its_positions_before_a_rank_starts(tmp_path, records):
    folder, data = folder_of(tmp_path / "model"), tmp_path / "data"
    data = data.with_suffix(".jsonl") if records else data.with_suffix(".txt")
    data.write_text('{"text": "ab"}\n' * 40 if records else "some text " * 400)
    options = [f"--model.hf={folder}", f"--data.path={data}", "--data.seq_len=64"]
    told = train(*options, *([] if records else ["--data.tokenizer=bytes"]))
    assert told.returncode == 2 and "starting the ranks" not in told.stderr
    if not records:  # records need a tokenizer, which is asked for first
        assert "which has 32 positions" in told.stderr and "use --data.seq_len=32 or less" in told.stderr


def test_a_directory_in_4_bits_stays_so_beside_adapters_and_else_asks_what_is_meant(tmp_path):
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = folder_of(tmp_path / "model", quantization_config=settings)
    words = [f"--model.hf={folder}", "--data.path=README.md", "--data.tokenizer=bytes", "--data.seq_len=16"]
    told = train(*words)
    assert told.returncode == 2 and "its weights are in 4 bits" in told.stderr
    assert "--parallel.lora.rank=16" in told.stderr and "--parallel.quantize=none" in told.stderr
    for more, quantize in (([], "nf4"), (["--parallel.quantize=none"], "none")):
        assert load_config(None, [*words, "--parallel.lora.rank=2", *more]).config.parallel.quantize == quantize


def test_a_quantised_directory_is_refused_by_its_configuration(tmp_path):
    folder = folder_of(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    told = train(f"--model.hf={folder}", "--data.path=README.md", "--data.tokenizer=bytes", "--data.seq_len=16")
    assert told.returncode == 2 and "quantization_config in its config.json names fp8" in told.stderr
    assert "FineGrainedFP8Config(dequantize=True)" in told.stderr and "model.cast" not in told.stderr


def test_the_fix_of_a_quantised_directory_gives_plain_weights(tmp_path):
    """What the error says to write, on a directory as transformers reads it."""
    import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).to(torch.bfloat16).save_pretrained(tmp_path)
    plain, packed = load_file(tmp_path / "model.safetensors"), {}
    for name, value in plain.items():
        if "proj" not in name:
            packed[name] = value
            continue
        scale = value.float().abs().max() / 448
        packed[name] = (value.float() / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(sw.CheckpointError) as caught, sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), world)
        sw.load_weights(model, tmp_path, strict=False, cast=True)
    assert "quantised weights" in str(caught.value) and "cast" not in caught.value.fix

    quantization_config = transformers.FineGrainedFP8Config(dequantize=True)
    AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization_config, dtype=torch.bfloat16
    ).save_pretrained(tmp_path / "bf16")
    found = load_file(tmp_path / "bf16/model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    for name, value in plain.items():
        assert (found[name].float() - value.float()).abs().max() <= 0.07 * value.float().abs().max()
