"""Ranks whose modules are not the same: refused by name before anything is made of them."""

import enum
import functools
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import RankError
from shardwise.parallel import parallelize
from shardwise.world import init

ABSENT = "absent"


def made_with(number):
    return lambda x: x * number


class Kind(enum.Enum):
    A, B = 1, 2


class Model(nn.Module):
    def __init__(self, width=8, *, eps=1e-5, act=F.relu, gate=nn.Sigmoid, approximate="none", config=None, **more):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.norm, self.gate, self.gelu = nn.LayerNorm(8, eps=eps), gate(), nn.GELU(approximate=approximate)
        self.act, self.config = act, types.SimpleNamespace(**(config or {}))
        for name, value in more.items():
            if name == "turn by":
                self.turn = made_with(value)
            elif name == "up.forward":
                if value is not None:
                    self.up.forward = value
            elif value is not ABSENT:
                setattr(self, name, value)

    def forward(self, x):
        return self.gelu(self.down(self.gate(self.act(self.up(self.norm(x))))))


def built_otherwise(layout: str, options: dict, example: dict):
    with init(layout, device="cpu", timeout_s=20) as world, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        here = {k: v[world.rank] for k, v in options.items()}
        examples = [{"x": torch.ones(2, 8)}, example]
        try:
            parallelize(Model(**here), world, example=examples[world.rank])
        except RankError as error:
            return str(error), error.ranks
        return [str(w.message) for w in told if "differs between ranks" in str(w.message)]


X = {"x": torch.ones(2, 8)}
OTHERWISE = {
    "norm.eps": ({"eps": (1e-5, 1.0)}, X, "rank 0: 1e-05; rank 1: 1"),
    "act": ({"act": (F.relu, F.gelu)}, X, "rank 0: torch.nn.functional.relu; rank 1: "),
    "gate, its class": ({"gate": (nn.Sigmoid, nn.Tanh)}, X, "rank 1: torch.nn.modules.activation.Tanh"),
    "gelu.approximate": ({"approximate": ("none", "tanh")}, X, "rank 0: 'none'; rank 1: 'tanh'"),
    "sizes": ({"sizes": ([1, 2], [1, 3])}, X, "rank 0: (1, 2); rank 1: (1, 3)"),
    "mixed": ({"mixed": ({"act": "gelu", "by": 1.0}, {"act": "gelu", "by": 2.0})}, X, "by: 2"),
    "by": ({"by": (None, 2.0)}, X, "rank 0: None; rank 1: 2"),
    "array": ({"array": (np.ones(3), np.zeros(3))}, X, "with the checksum"),
    "turn": ({"turn by": (1, 2)}, X, "made_with.<locals>.<lambda> with the checksum"),
    "dtype": ({"dtype": (torch.float32, torch.float64)}, X, "torch.float64"),
    "up, its own forward": ({"up.forward": (None, torch.sin)}, X, "sin"),
    "kind": ({"kind": (Kind.A, Kind.B)}, X, "Kind.B"),
    "step": ({"step": (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu))}, X, "approximate"),
    "tensor table": ({"table": (torch.ones(3), torch.ones(4))}, X, 'rank 1: ["torch.float32",4]'),
    "parameter up.weight: shape": ({"width": (8, 16)}, X, "rank 0: [8,8]; rank 1: [16,8]"),
    "example": ({}, {"x": torch.ones(3, 2, 8)}, 'rank 1: {"x":["torch.float32",3]}'),
}
"""What differs -> options of both ranks, the example of rank 1, and a part of what is said."""


@pytest.mark.combinations("values")
@pytest.mark.parametrize("what", OTHERWISE)
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2", "tp=2"])
def test_a_module_that_one_rank_builds_otherwise_is_refused(ranks, layout, what):
    options, example, said = OTHERWISE[what]
    for text, who in ranks.run(built_otherwise, 2, layout, options, example):
        assert who == (1,) and f"the ranks' modules differ between ranks: {what}\n" in text and said in text


def test_what_may_differ(ranks):
    """Where a rank runs, where its module came from, and values that no forward computes with."""
    options = {
        "local_rank": (0, 1),
        "device_index": (0, 1),
        "name_or_path": ("gpt2", ""),
        "started": (object(), None),
        "table": (torch.ones(3), torch.zeros(3)),  # rank 0's is sent
        "sizes": ((1, 2), torch.Size([1, 2])),
        "scale": (1, np.float64(1.0)),
        "is_main": (True, False),
        "start_time": (1.5, 2.5),
        "base_seed": (3, 4),
        "_use_kernels": (False, ABSENT),  # set by from_pretrained, which rank 0 alone may call
        "object_hash": (17, -5),
        "config": ({"_commit": "a", "width": 8}, {"_commit": None, "width": 8}),
    }
    assert ranks.run(built_otherwise, 2, "tp=2", options, X) == [[], []]


def test_texts_of_ones_own_modules_are_warned_about(ranks):
    first, second = ranks.run(built_otherwise, 2, "dp_shard=2", {"run_id": ("a", "b"), "kind": ("c", "d")}, X)
    assert second == [] and len(first) == 1
    assert first[0].startswith("run_id (and 1 more) differs between ranks: rank 0: 'a'; rank 1: 'b'")


def test_settings_of_a_config_are_warned_about(ranks):
    options = {"config": ({"scale": 1.0, "name_or_path": "a"}, {"scale": 2.0, "name_or_path": "b"})}
    first, second = ranks.run(built_otherwise, 2, "dp_shard=2", options, X)
    assert second == [] and len(first) == 1
    assert first[0].startswith("config.scale differs between ranks: rank 0: 1; rank 1: 2. If the forward reads it")
