"""What the Trainer's scripts train: a tiny Llama of transformers. Its labels are not shifted, as collators make them."""

import torch
from tiny import samples
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, use_cache=False
)


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG)


def conversations() -> list[dict[str, torch.Tensor]]:
    """Labels are the tokens themselves, or -100 where there is nothing to learn."""
    return [
        {"input_ids": row["input_ids"], "labels": torch.where(row["labels"] == -100, -100, row["input_ids"])}
        for row in samples()
    ]
