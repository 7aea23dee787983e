"""Models from Hugging Face directories: the class that config.json names, or a sentence that says why not."""

import json

import pytest
import torch
from transformers import BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.run.attention import without_kernels
from shardwise.run.config import load_config
from shardwise.run.pretrained import build_pretrained, vocab_in

SMALL = {"vocab_size": 19, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def changed(folder, **fields):
    content = json.loads((folder / "config.json").read_text())
    content.update(fields)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(folder)


def test_the_class_that_is_named_is_built_with_the_changes_asked_for(folder):
    model = build_pretrained(str(folder), {"attention_dropout": 0.25})
    assert type(model) is LlamaForCausalLM and model.config.attention_dropout == 0.25
    assert vocab_in(str(folder)) == 19
    assert type(build_pretrained(changed(folder, architectures=None), {})) is LlamaForCausalLM
    bert = changed(folder, architectures=["BertForMaskedLM"], model_type="bert")
    assert type(build_pretrained(bert, {})) is BertForMaskedLM


@pytest.mark.parametrize(
    ("fields", "args", "text"),
    [
        ({}, {"hiden_size": 3}, "did you mean 'hidden_size'"),
        ({"architectures": ["GonePretrained"]}, {}, "transformers"),
        ({"auto_map": {"AutoModel": "code.Model"}}, {}, "which is not run"),
    ],
)
def test_what_cannot_be_built_is_told(folder, fields, args, text):
    with pytest.raises(sw.ConfigError, match=text):
        build_pretrained(changed(folder, **fields), args)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_the_attention_that_is_asked_for_runs(folder, name, monkeypatch):
    from transformers.models.llama import modeling_llama

    model = build_pretrained(str(folder), {"attn_implementation": name})
    assert model.config._attn_implementation == name and "attn_implementation" not in model.config.to_dict()
    ran = []
    get = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface
    monkeypatch.setattr(
        modeling_llama.ALL_ATTENTION_FUNCTIONS,
        "get_interface",
        lambda kind, *more: ran.append(kind) or get("eager", *more),
    )
    if name != "flex_attention":  # its masks are made by a compiler
        model(torch.arange(5)[None])
        assert set(ran) == {name}


def test_a_class_without_that_attention_is_told(folder):
    deberta = changed(folder, architectures=["DebertaV2ForMaskedLM"], model_type="deberta-v2")
    with pytest.raises(sw.ConfigError, match="DebertaV2ForMaskedLM") as caught:
        build_pretrained(deberta, {"attn_implementation": "sdpa"})
    assert "another implementation" in caught.value.fix


def test_the_proof_computes_without_kernels():
    for given, left in (("flash_attention_2", "sdpa"), ("flex_attention", "sdpa"), ("eager", "eager")):
        words = ["--model.hf=DIR", f"--model.args.attn_implementation={given}", "--model.args.attention_dropout=0.5"]
        config, said = without_kernels(load_config(None, words).config)
        assert config.model.args == {"attn_implementation": left, "attention_dropout": 0.5}
        assert said == ([] if left == given else [f"{given}, in whose place sdpa ran"])


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_configuration_that_is_none_is_told_by_its_path(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(sw.ConfigError, match=r"config\.json"):
        build_pretrained(str(tmp_path), {})
