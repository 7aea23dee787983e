"""Adapters of experts that are stacked in one parameter, and of other parameters that are in no layer."""

import functools

import models
import torch
import pytest
import torch
from torch import nn
from torch.nn import functional
from models.hugging_face import DECODER, hf
from techniques.lora.test_parity import compared

import shardwise as sw

STACKS = ("gate_up_proj", "down_proj")
SMALL = {**DECODER, "experts_implementation": "eager", "num_hidden_layers": 2, "num_experts_per_tok": 2}


def mixtral():
    return hf("MixtralConfig", "MixtralForCausalLM", **SMALL, num_local_experts=4)


def qwen3_moe():
    return hf("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **SMALL, num_experts=4, moe_intermediate_size=8)


BUILDS = {"mixtral": mixtral, "qwen3-moe": qwen3_moe}


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_x(ranks, layout):
    compared(ranks, "mixtral", layout, sw.LoRA(rank=2, experts=STACKS), build=mixtral, max_grad_norm=0.05)


class Stack(nn.Module):
    """Experts, of which all get every position; ``how`` says who reads their weights, and how."""

    def __init__(self, how="own"):
        super().__init__()
        self.how, self.weights, self.bare = how, nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = torch.einsum("eoi,bi->bo", self.weights, x)
        weight = self._parameters["bare"] if self.how == "parameters" else self.bare
        return functional.linear(y, weight)


class Outer(nn.Module):
    def __init__(self, how="own"):
        super().__init__()
        self.stack, self.up = Stack(how), nn.Linear(8, 8)

    def forward(self, x):
        y = self.stack(self.up(x))
        if self.stack.how == "matrix":
            return functional.linear(y, self.stack.bare)
        return y @ self.stack.weights[0] if self.stack.how == "stack" else y
