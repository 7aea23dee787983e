"""Every causal language model of the installed transformers, small: what the sweep of tensor parallelism runs.

Sizes are set by the names that configurations use for them. A configuration that cannot be made small so, or a model
that does not run, is reported with its reason, and says nothing of the layout.
"""

import functools
import inspect
import os
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn

__all__ = ["build", "builder", "has_experts", "names", "windows"]

VOCAB, LENGTH = 96, 8

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "max_sequence_length": 64,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32, "embed_dim": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "ffn_hidden_size": 48, "shared_intermediate_size": 16, "mlp_hidden_size": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "feed_forward_size": 48, "dense_intermediate_size": 48, "intermediate_size_mlp": 48,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "attention_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "kv_heads": 2, "n_head_kv": 2, "head_dim": 8, "d_kv": 8, "kv_channels": 8, "attention_head_dim": 8,
    "rotary_dim": 4, "query_pre_attn_scalar": 8, "sliding_window": 4, "attention_window": 4, "window_size": 4, "local_attention": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "qk_head_dim": 12, "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "moe_top_k": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "moe_ffn_hidden_size": 16,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "decoder_sparse_step": 1,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4, "mamba_d_ssm": 64, "mamba_dt_rank": 4, "n_mamba_heads": 2,
    "state_size": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 4, "time_step_rank": 4, "lru_width": 32, "attention_hidden_size": 32,
    "linear_num_heads": 4, "linear_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": 4, "rel_extent": 16, "unpadded_vocab_size": VOCAB, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
DROPOUTS = ("drop", "pdrop", "dropout")
OF_A_KIND = {  # where one table does not serve
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
OF_DEFAULT_DTYPE = ("xglm",)
"""Kinds whose code makes numbers of torch's default dtype, and of the range of its parameters'."""


def names() -> list[str]:
    """The types of configurations that have a causal language model, in transformers' order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _sizes(config: Any, kind: str) -> dict[str, Any]:
    """The arguments of a smaller configuration of the same class."""
    given = config.to_dict()
    parameters = inspect.signature(type(config).__init__).parameters
    found: dict[str, Any] = {}
    for key in given.keys() | parameters.keys():
        if (
            key in SIZES
            and type(given.get(key, SIZES[key])) in (int, type(None))
            and not (given.get(key) is None and key == "n_inner")
        ):
            found[key] = SIZES[key]
        elif any(word in key for word in DROPOUTS) and type(given.get(key)) is float:
            found[key] = 0.0
        elif key in ("layer_types", "mlp_layer_types", "layers_block_type", "attention_types") and isinstance(
            given.get(key), list
        ):
            found[key] = given[key][:2]
    latent = {"head_dim": 4, "num_key_value_heads": 4} if "qk_rope_head_dim" in found else {}
    return {**found, **{key: value for key, value in latent.items() if key in found}, **OF_A_KIND.get(kind, {})}


def _config(kind: str) -> Any:
    """A small configuration."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    default = cls()
    text = default.get_text_config()
    if text is not default:
        return type(text)(**_sizes(text, kind))
    sizes = _sizes(default, kind)
    try:
        return cls(**sizes)
    except Exception:  # of arguments that it derives from others
        rest = {
            key: value for key, value in sizes.items() if "layer" not in key or "num" in key or key.startswith("n_")
        }
        return cls(**rest)


def build(kind: str) -> nn.Module:
    """The model of a kind, with its norms and biases away from ones and zeros."""
    from transformers import AutoModelForCausalLM

    config = _config(kind)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if model.num_parameters() > 8_000_000:
        raise ValueError(f"it stays big: {model.num_parameters():,} parameters")
    model.config.use_cache = False
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param += 0.1 * torch.randn(param.shape, generator=generator)
    if kind in OF_DEFAULT_DTYPE:
        model.register_forward_pre_hook(lambda module, _: torch.set_default_dtype(module.dtype))
        model.register_forward_hook(lambda *_: torch.set_default_dtype(torch.float32), always_call=True)
    return model.eval()


def windows(model: nn.Module, steps: int, num_micro: int) -> list[list[dict[str, Tensor]]]:
    """Micro-batches with unequal numbers of tokens; with outputs of an encoder where the model attends to one."""
    generator = torch.Generator().manual_seed(0)

    def batch(index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, VOCAB, (2, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, : index % 4] = -100
        found = {"input_ids": ids[:, :-1].contiguous(), "labels": labels}
        if width is not None:
            found["encoder_hidden_states"] = torch.randn(2, 5, width, generator=generator)
        return found

    width = None
    if _attends_to_encoder(model):
        width = getattr(model.config, "cross_attention_hidden_size", None) or model.config.hidden_size
    return [[batch(i) for i in range(num_micro)] for _ in range(steps)]


def _attends_to_encoder(model: Any) -> bool:
    """Whether it takes outputs of an encoder, and has parameters that it uses only then."""
    if "encoder_hidden_states" not in inspect.signature(model.forward).parameters:
        return False
    model(input_ids=torch.full((2, LENGTH), 3)).logits.sum().backward()
    is_unused = any(param.grad is None for param in model.parameters() if param.requires_grad)
    model.zero_grad()
    return is_unused


def has_experts(model: nn.Module) -> bool:
    """Whether its tokens go to different layers."""
    words = ("expert", "moe", "router")
    return any(word in type(module).__name__.lower() for module in model.modules() for word in words)


def builder(kind: str) -> Any:
    """A function that builds the model of a kind on any rank."""
    return functools.partial(build, kind)
