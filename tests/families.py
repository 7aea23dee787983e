"""Families of transformers beyond the zoo's, tiny and from their configurations, each with what makes it hard.

Everything is built by top-level functions, so that ranks can build it. Dropout, layer drop and spectrogram masks are off:
parity is against one process, whose masks are its own.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from subjects import Subject
from torch import Tensor, nn
from zoo import VOCAB, Case, class_loss, hf, images, pairs, tokens

# ---- batches and losses -----------------------------------------------------------------------------------------


def longer(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Sequences longer than a window of 4."""
    return tokens(generator, index, length=9)


def pictures(generator: torch.Generator, index: int, side: int = 32) -> dict[str, Tensor]:
    size = 2 + index % 3
    x = torch.randn(size, 3, side, side, generator=generator, dtype=torch.float64)
    return {"pixel_values": x, "labels": torch.randint(0, 5, (size,), generator=generator)}


def sound(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Waves, and a label for some of their frames."""
    waves = torch.randn(2, 90, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (2, 21), generator=generator)
    labels[0, : index % 6] = -100
    return {"input_values": waves, "labels": labels}


def speech(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Spectrograms, and what was said."""
    said = tokens(generator, index)
    frames = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    return {"input_features": frames, "decoder_input_ids": said["input_ids"], "labels": said["labels"]}


def captions(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Pictures and texts; the label of a picture is the number of its text."""
    size = 2 + index % 3
    ids = torch.randint(3, VOCAB - 1, (size, 6), generator=generator)
    ids[:, -1] = VOCAB - 1
    pixels = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "labels": torch.arange(size)}


def seen_text(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Texts in which four places stand for the patches of a picture."""
    batch = tokens(generator, index, length=9)
    ids = batch["input_ids"].clamp(max=VOCAB - 2)
    ids[:, :4] = VOCAB - 1
    pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "labels": batch["labels"]}


def seen_turns(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Texts with a picture in each, given as patches and their numbers per side: four of them are one token."""
    batch = tokens(generator, index, length=9)
    ids = batch["input_ids"].clamp(max=VOCAB - 5)
    ids[:, 0], ids[:, 1] = VOCAB - 4, VOCAB - 1
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == VOCAB - 1).long(),
        "pixel_values": torch.randn(8, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
        "labels": batch["labels"],
    }


def contrastive_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    rows = F.cross_entropy(output.logits_per_image, batch["labels"], reduction="sum")
    return (rows + F.cross_entropy(output.logits_per_text, batch["labels"], reduction="sum")) / 2


# ---- models -----------------------------------------------------------------------------------------------------

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


def _family(
    name: str,
    kind: str,
    config: str,
    model: str,
    hard: str,
    settings: dict[str, Any],
    batch: Any = tokens,
    units: Any = "auto",
    **contract: Any,
) -> Subject:
    case = Case(name, functools.partial(hf, config, model, **settings), batch, **contract)
    return Subject(case, kind, model, hard, units=units)


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

FAMILIES = {
    family.name: family
    for family in (
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
        _family(
            "gpt-neox", "decoder", "GPTNeoXConfig", "GPTNeoXForCausalLM", "fused q, k, v by head", {**_TEXT, **_IDS}
        ),
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
        Subject(
            Case("llava", llava, seen_text),
            "multimodal",
            "LlavaForConditionalGeneration",
            "a model of vision before a model of language",
        ),
        Subject(
            Case("qwen3-vl-moe", qwen3_vl_moe, seen_turns),
            "multimodal",
            "Qwen3VLMoeForConditionalGeneration",
            "vision that reaches into several layers of language, experts that lie turned in published files",
        ),
    )
}
