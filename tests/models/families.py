"""Families of transformers beyond the parity matrix's, tiny and from their configurations, each with what makes it hard.

Dropout, layer drop and spectrogram masks are off: parity is against one process, whose masks are its own.
"""

import functools
from typing import Any

from torch import nn

from models.batches import (
    VOCAB,
    captions,
    class_loss,
    contrastive_loss,
    images,
    longer,
    pairs,
    seen_text,
    seen_turns,
    sound,
    speech,
    tokens,
)
from models.hugging_face import hf, tiny
from models.record import Model

pictures = functools.partial(images, side=32)
_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_BLOCKS = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 12, "intermediate_size": 20}
_TEXT = {**_BLOCKS, "vocab_size": VOCAB, "pad_token_id": 0, "max_position_embeddings": 16}
_DECODER = {**_TEXT, **_IDS, "num_key_value_heads": 1, "head_dim": 6}
_CONVS = {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2}
_SOUND = {
    **_BLOCKS,
    "vocab_size": VOCAB,
    **_CONVS,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
_HALVES = {
    "vocab_size": VOCAB,
    "d_model": 12,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    **_IDS,
}
_STAGES = {"num_labels": 5}
_STATE = {"vocab_size": VOCAB, "num_hidden_layers": 3, "pad_token_id": 0, **_IDS}
_EYE = {**_BLOCKS, "image_size": 8, "patch_size": 4}
_LOOP = {"experts_implementation": "eager"}  # the default, a grouped product, knows no float64
_MAMBA2 = {"hidden_size": 12, "head_dim": 6, "num_heads": 4, "n_groups": 2, "state_size": 4, "chunk_size": 4}


def llava() -> nn.Module:
    """A ViT of CLIP, a projector and a Llama, under one head."""
    from transformers import CLIPVisionConfig, LlamaConfig

    eye, text = CLIPVisionConfig(**_EYE), LlamaConfig(**_DECODER)
    return hf(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        vision_config=eye,
        text_config=text,
        image_token_id=VOCAB - 1,
        vision_feature_layer=-1,
    )


def qwen3_vl_moe() -> nn.Module:
    """A tower of vision whose middle blocks reach into the first blocks of a language model with experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
    eye = {"depth": 3, "num_heads": 2, "hidden_size": 16, "intermediate_size": 20, "patch_size": 4}
    return hf(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        text_config={**_DECODER, **experts, "rope_parameters": rope},
        vision_config={
            **eye,
            "out_hidden_size": 12,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        vision_start_token_id=VOCAB - 4,
        vision_end_token_id=VOCAB - 3,
        video_token_id=VOCAB - 2,
        image_token_id=VOCAB - 1,
        **_LOOP,
    )


_EYES_AND_TEXT = {
    "text_config": {**_TEXT, "bos_token_id": 1, "eos_token_id": VOCAB - 1},
    "vision_config": _EYE,
    "projection_dim": 8,
}

_record = functools.partial(Model, tags=("transformers", "foreign"), package="transformers")


def _family(
    name: str,
    kind: str,
    config: str,
    model: str,
    hard: str,
    settings: dict[str, Any],
    batch: Any = tokens,
    **contract: Any,
) -> Model:
    return _record(
        name=name, build=tiny(config, model, **settings), batch=batch, kind=kind, model=model, hard=hard, **contract
    )


MODELS = (
    _family(
        "mistral",
        "decoder",
        "MistralConfig",
        "MistralForCausalLM",
        "sliding window, grouped heads",
        {**_DECODER, "sliding_window": 4},
        longer,
    ),
    _family(
        "gemma2",
        "decoder",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        "tied head, capped logits, two kinds of layers",
        {**_DECODER, "sliding_window": 4, "query_pre_attn_scalar": 6},
        longer,
    ),
    _family(
        "gemma3",
        "decoder",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        "two rotary tables, a buffer that scales the embedding",
        {**_DECODER, "sliding_window": 4, "query_pre_attn_scalar": 6},
        longer,
    ),
    _family(
        "opt",
        "decoder",
        "OPTConfig",
        "OPTForCausalLM",
        "learned positions with an offset, tied head",
        {
            "vocab_size": VOCAB,
            "hidden_size": 12,
            "ffn_dim": 20,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "word_embed_proj_dim": 12,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            **_IDS,
        },
    ),
    _family(
        "phi",
        "decoder",
        "PhiConfig",
        "PhiForCausalLM",
        "parallel blocks, part of each head rotated",
        {**_TEXT, **_IDS, "hidden_size": 16},
    ),
    _family("gpt-neox", "decoder", "GPTNeoXConfig", "GPTNeoXForCausalLM", "fused q, k, v by head", {**_TEXT, **_IDS}),
    _family(
        "bloom",
        "decoder",
        "BloomConfig",
        "BloomForCausalLM",
        "ALiBi, a norm after the embedding, residuals given as arguments",
        {"vocab_size": VOCAB, "hidden_size": 12, "n_layer": 3, "n_head": 2, **_IDS},
    ),
    _family(
        "falcon",
        "decoder",
        "FalconConfig",
        "FalconForCausalLM",
        "one key and value head, Linears of its own",
        {
            "vocab_size": VOCAB,
            "hidden_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
            **_IDS,
        },
    ),
    _family(
        "roberta",
        "encoder",
        "RobertaConfig",
        "RobertaForMaskedLM",
        "head tied with its bias, positions counted from the padding",
        {**_TEXT, **_IDS},
    ),
    _family(
        "distilbert",
        "encoder",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        "configuration words of its own, tied head",
        {
            "vocab_size": VOCAB,
            "dim": 12,
            "hidden_dim": 20,
            "n_layers": 3,
            "n_heads": 2,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
        },
    ),
    _family(
        "deberta-v2",
        "encoder",
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        "one table of relative positions used by every block",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
    ),
    _family(
        "albert",
        "encoder",
        "AlbertConfig",
        "AlbertForMaskedLM",
        "one block that runs three times",
        {**_TEXT, "embedding_size": 8},
    ),
    _family(
        "bart",
        "encoder-decoder",
        "BartConfig",
        "BartForConditionalGeneration",
        "three ties of one embedding, a buffer on the root",
        {**_HALVES, "max_position_embeddings": 16},
        pairs,
    ),
    _family(
        "whisper",
        "encoder-decoder",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "convolutions first, frozen sinusoids, tied head",
        {
            **_HALVES,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "apply_spec_augment": False,
        },
        speech,
    ),
    _family(
        "convnext",
        "vision",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        "stages of unequal width, a scale per channel",
        {**_STAGES, "hidden_sizes": [4, 8, 8, 12], "depths": [1, 1, 2, 1]},
        pictures,
        loss=class_loss,
    ),
    _family(
        "swin",
        "vision",
        "SwinConfig",
        "SwinForImageClassification",
        "shifted windows, tables of relative positions, merged patches",
        {
            **_STAGES,
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        pictures,
        loss=class_loss,
    ),
    _family(
        "deit",
        "vision",
        "DeiTConfig",
        "DeiTForImageClassification",
        "two tokens and a table of positions beside the blocks",
        {**_EYE, **_STAGES},
        images,
        loss=class_loss,
    ),
    _family(
        "resnet",
        "vision",
        "ResNetConfig",
        "ResNetForImageClassification",
        "batch norm in every block",
        {**_STAGES, "embedding_size": 6, "hidden_sizes": [6, 8], "depths": [2, 2], "layer_type": "basic"},
        pictures,
        loss=class_loss,
    ),
    _family(
        "wav2vec2",
        "audio",
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        "weight norm, a parametrised convolution",
        _SOUND,
        sound,
    ),
    _family(
        "hubert", "audio", "HubertConfig", "HubertForCTC", "weight norm, a mask embedding never used", _SOUND, sound
    ),
    _family(
        "mamba",
        "state space",
        "MambaConfig",
        "MambaForCausalLM",
        "A_log and D on no Linear, values written after the constructor",
        {**_STATE, "hidden_size": 12, "state_size": 4, "time_step_rank": 2},
    ),
    _family(
        "mamba2",
        "state space",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        "grouped states, scans in chunks",
        {**_STATE, **_MAMBA2},
    ),
    _family(
        "mixtral",
        "mixture",
        "MixtralConfig",
        "MixtralForCausalLM",
        "experts in one 3-D parameter, tokens choose",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, **_LOOP},
    ),
    _family(
        "clip",
        "multimodal",
        "CLIPConfig",
        "CLIPModel",
        "two towers, a 0-dim parameter, a loss over pairs",
        _EYES_AND_TEXT,
        captions,
        loss=contrastive_loss,
    ),
    _record(
        name="llava",
        build=llava,
        batch=seen_text,
        kind="multimodal",
        model="LlavaForConditionalGeneration",
        hard="a model of vision before a model of language",
    ),
    _record(
        name="qwen3-vl-moe",
        build=qwen3_vl_moe,
        batch=seen_turns,
        kind="multimodal",
        model="Qwen3VLMoeForConditionalGeneration",
        hard="vision that reaches into several layers of language, experts that lie turned in published files",
    ),
)
