"""Tiny models of transformers from their configurations, and those that the parity matrix has."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from models.batches import VOCAB, class_loss, images, pairs, tokens
from models.record import Model

IDS = {"bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 12, "intermediate_size": 20}
TEXT = {**BLOCKS, "vocab_size": VOCAB, "pad_token_id": 0, "max_position_embeddings": 16}
DECODER = {**TEXT, **IDS, "num_key_value_heads": 1, "head_dim": 6}
_SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 3, "num_attention_heads": 2, "pad_token_id": 0}


def hf(config: str, model: str, **changes: Any) -> nn.Module:
    """A tiny transformers model from its config, without dropout (its masks are not one process's), eager attention."""
    import transformers

    made = getattr(transformers, config)(attn_implementation="eager", **changes)
    for name in list(vars(made)):
        if "drop" in name and isinstance(getattr(made, name), float):
            setattr(made, name, 0.0)
    built = getattr(transformers, model)(made)
    for part in built.modules():  # an encoder-decoder gives each half a configuration of its own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return built


_LLAMA = {**_SMALL, **IDS, "hidden_size": 12, "intermediate_size": 20, "num_key_value_heads": 1}
_BERT = {"hidden_size": 12, "intermediate_size": 20, "max_position_embeddings": 16}
_VIT = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 12, "intermediate_size": 20, "num_labels": 5}
_T5 = {"vocab_size": VOCAB, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": 16, **IDS}


def tiny(config: str, model: str, **changes: Any) -> Callable[[], nn.Module]:
    """What builds ``hf(config, model, **changes)``, for ranks too."""
    return functools.partial(hf, config, model, **changes)


foreign = functools.partial(Model, tags=("transformers", "foreign"), package="transformers")
"""A record of a family that the parity matrix leaves out."""


def family(
    name: str,
    kind: str,
    config: str,
    model: str,
    hard: str,
    settings: dict[str, Any],
    batch: Any = tokens,
    **contract: Any,
) -> Model:
    """A family that a configuration alone makes."""
    return foreign(
        name=name, build=tiny(config, model, **settings), batch=batch, kind=kind, model=model, hard=hard, **contract
    )


_matrix = functools.partial(Model, tags=("transformers", "matrix"), package="transformers")

MODELS = (
    _matrix(name="llama", build=tiny("LlamaConfig", "LlamaForCausalLM", **_LLAMA), batch=tokens),
    _matrix(name="gpt2", build=tiny("GPT2Config", "GPT2LMHeadModel", **_GPT2), batch=tokens),
    _matrix(name="qwen3", build=tiny("Qwen3Config", "Qwen3ForCausalLM", **_LLAMA, head_dim=6), batch=tokens),
    _matrix(name="t5", build=tiny("T5Config", "T5ForConditionalGeneration", **_T5, **IDS), batch=pairs),
    _matrix(name="bert", build=tiny("BertConfig", "BertForMaskedLM", **_SMALL, **_BERT), batch=tokens),
    _matrix(
        name="vit",
        build=tiny("ViTConfig", "ViTForImageClassification", **_VIT, image_size=8, patch_size=4),
        batch=images,
        loss=class_loss,
    ),
)
