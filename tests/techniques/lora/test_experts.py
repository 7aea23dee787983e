"""Adapters of experts that are stacked in one parameter, and of other parameters that are in no layer."""

import functools

import models
import pytest
from models.hugging_face import DECODER, hf
from techniques.lora.test_parity import compared

import shardwise as sw

STACKS = ("gate_up_proj", "down_proj")
SMALL = {**DECODER, "num_hidden_layers": 2, "num_experts_per_tok": 2}


def mixtral():
    return hf("MixtralConfig", "MixtralForCausalLM", **SMALL, num_local_experts=4)


def qwen3_moe():
    return hf("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **SMALL, num_experts=4, moe_intermediate_size=8)


BUILDS = {"mixtral": mixtral, "qwen3-moe": qwen3_moe}


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_x(ranks, layout):
    compared(ranks, "mixtral", layout, sw.LoRA(rank=2, experts=STACKS), build=mixtral, max_grad_norm=0.05)
