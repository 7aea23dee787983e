"""Models from Hugging Face directories: the class that config.json names, or a sentence that says why not."""

import json

import pytest
from transformers import BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import shardwise as sw
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


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_configuration_that_is_none_is_told_by_its_path(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(sw.ConfigError, match=r"config\.json"):
        build_pretrained(str(tmp_path), {})
