"""Families of transformers that see, hear, keep a state or route tokens, tiny, each with what makes it hard."""

import functools

from torch import nn

from models.batches import VOCAB, captions, class_loss, contrastive_loss, images, seen_text, seen_turns, sound
from models.hugging_face import BLOCKS, DECODER, IDS, TEXT, family, foreign, hf

_CONVS = {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2}
_SOUND = {
    **BLOCKS,
    "vocab_size": VOCAB,
    **_CONVS,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
_STAGES = {"num_labels": 5}
_STATE = {"vocab_size": VOCAB, "num_hidden_layers": 3, "pad_token_id": 0, **IDS}
_EYE = {**BLOCKS, "image_size": 8, "patch_size": 4}
_MAMBA2 = {"hidden_size": 12, "head_dim": 6, "num_heads": 4, "n_groups": 2, "state_size": 4, "chunk_size": 4}

pictures = functools.partial(images, side=32)


def llava() -> nn.Module:
    """A ViT of CLIP, a projector and a Llama, under one head."""
    from transformers import CLIPVisionConfig, LlamaConfig

    eye, text = CLIPVisionConfig(**_EYE), LlamaConfig(**DECODER)
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
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    }  # in rows of 16 bytes, as a grouped product wants
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
    eye = {"depth": 3, "num_heads": 2, "hidden_size": 16, "intermediate_size": 20, "patch_size": 4}
    return hf(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        text_config={**DECODER, **experts, "rope_parameters": rope},
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
    )


_EYES_AND_TEXT = {
    "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": VOCAB - 1},
    "vision_config": _EYE,
    "projection_dim": 8,
}


MODELS = (
    family(
        "convnext",
        "vision",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        "stages of unequal width, a scale per channel",
        {**_STAGES, "hidden_sizes": [4, 8, 8, 12], "depths": [1, 1, 2, 1]},
        pictures,
        loss=class_loss,
    ),
    family(
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
    family(
        "deit",
        "vision",
        "DeiTConfig",
        "DeiTForImageClassification",
        "two tokens and a table of positions beside the blocks",
        {**_EYE, **_STAGES},
        images,
        loss=class_loss,
    ),
    family(
        "resnet",
        "vision",
        "ResNetConfig",
        "ResNetForImageClassification",
        "batch norm in every block",
        {**_STAGES, "embedding_size": 6, "hidden_sizes": [6, 8], "depths": [2, 2], "layer_type": "basic"},
        pictures,
        loss=class_loss,
    ),
    family(
        "wav2vec2",
        "audio",
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        "weight norm, a parametrised convolution",
        _SOUND,
        sound,
    ),
    family(
        "hubert", "audio", "HubertConfig", "HubertForCTC", "weight norm, a mask embedding never used", _SOUND, sound
    ),
    family(
        "mamba",
        "state space",
        "MambaConfig",
        "MambaForCausalLM",
        "A_log and D on no Linear, values written after the constructor",
        {**_STATE, "hidden_size": 12, "state_size": 4, "time_step_rank": 2},
    ),
    family(
        "mamba2",
        "state space",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        "grouped states, scans in chunks",
        {**_STATE, **_MAMBA2},
    ),
    family(
        "mixtral",
        "mixture",
        "MixtralConfig",
        "MixtralForCausalLM",
        "experts in one 3-D parameter, tokens choose",
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    family(
        "clip",
        "multimodal",
        "CLIPConfig",
        "CLIPModel",
        "two towers, a 0-dim parameter, a loss over pairs",
        _EYES_AND_TEXT,
        captions,
        loss=contrastive_loss,
    ),
    foreign(
        name="llava",
        build=llava,
        batch=seen_text,
        kind="multimodal",
        model="LlavaForConditionalGeneration",
        hard="a model of vision before a model of language",
    ),
    foreign(
        name="qwen3-vl-moe",
        build=qwen3_vl_moe,
        batch=seen_turns,
        kind="multimodal",
        model="Qwen3VLMoeForConditionalGeneration",
        hard="vision that reaches into several layers of language, experts that lie turned in published files",
    ),
)
