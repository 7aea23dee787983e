"""Families of transformers whose layers are put together in ways that tensor parallelism has to tell apart."""

import functools
from typing import Any

from models.batches import VOCAB, tokens
from models.hugging_face import DECODER, IDS, TEXT, tiny
from models.record import Model

_FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    **IDS,
}
_DEEPSEEK = {
    **TEXT,
    **IDS,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "kv_lora_rank": 6,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _model(name: str, config: str, model: str, settings: dict[str, Any]) -> Model:
    return Model(name=name, build=tiny(config, model, **settings), batch=tokens, package="transformers", tags=("tp",))


_falcon = functools.partial(_model, config="FalconConfig", model="FalconForCausalLM")

MODELS = (
    _falcon("falcon: one key and value head", settings={**_FALCON, "multi_query": True, "parallel_attn": True}),
    _falcon("falcon: groups", settings={**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    _falcon(
        "falcon: as many heads, with ALiBi",
        settings={**_FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    _model("gemma", "GemmaConfig", "GemmaForCausalLM", {**DECODER, "num_key_value_heads": 1}),
    _model("olmo2", "Olmo2Config", "Olmo2ForCausalLM", {**DECODER, "num_key_value_heads": 2, "hidden_size": 12}),
    _model("deepseek-v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK),
)
