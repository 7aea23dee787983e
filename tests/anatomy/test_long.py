"""Reading a forward takes work in step with its length, however often its branches and calls meet the same modules."""

import importlib
import sys

import pytest
import torch

from shardwise.anatomy import read_anatomy
from shardwise.anatomy.code import entries

HEAD = """
from torch import nn

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.second = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.flag = True

    def go(self, x):
        return x

    def come(self, x):
        return x

"""

# What is said again and again between the start of a forward and its end.
SWAPS = (
    "a, b = self.first, self.second",
    "if self.flag:\n            a, b = b, a",
    "for block in a:\n            x = block(x)",
)
PAIRS = ("a = self.first", "a = (a, a)", "x = self.first[0](x) if a == x else x")
METHODS = (
    "a, b = self.go, self.come",
    "for _ in range(2):\n            if self.flag:\n                a, b = b, a",
    "x = a(x)",
)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Makes a model of a text: the reader wants its source in a file."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, body):
        (tmp_path / f"{name}.py").write_text(HEAD + body)
        importlib.invalidate_caches()
        try:
            return importlib.import_module(name).M()
        finally:
            del sys.modules[name]

    return write


def forward(start, middle, end, times):
    return "\n        ".join(["    def forward(self, x):", start, *[middle] * times, end, "return x"]) + "\n"


def steps(model):
    """How many calls, of ours and of Python's own functions, reading ``model`` takes."""
    count = 0

    def one_more(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(one_more)
    try:
        read_anatomy(model)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("text", [SWAPS, PAIRS, METHODS], ids=["branches", "pairs of pairs", "methods"])
def test_the_work_grows_with_the_length_of_a_forward_and_no_faster(written, text):
    short, long = (steps(written(f"repeated_{times}", forward(*text, times))) for times in (7, 14))
    assert long < 2.5 * short


def test_reading_ends_where_each_function_calls_the_next_one_twice(written, monkeypatch):
    monkeypatch.setattr(entries, "_MAX_EXPRESSIONS", 2000)
    links = "".join(f"    def f{i}(self, x):\n        return self.f{i + 1}(self.f{i + 1}(x))\n\n" for i in range(20))
    last = "    def f20(self, x):\n        return self.first[1](self.first[0](x))\n\n"
    found = read_anatomy(written("chained", forward("x = self.f0(x)", "pass", "", 1) + links + last)).lists
    assert "in more ways than are read" in found[0].why and not any(item.always_entered for item in found)


def test_a_model_of_pictures_and_text_is_read_in_bounded_work():
    import transformers

    blocks = {"hidden_size": 8, "intermediate_size": 16, "num_heads": 2}
    text = {**blocks, "vocab_size": 11, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 4, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
    eye = {**blocks, "depth": 2, "patch_size": 4, "out_hidden_size": 8, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=eye)
    with torch.device("meta"):
        model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    assert steps(model) < 3_000_000
