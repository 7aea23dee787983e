"""Which dims of a batch's tensors are the positions of ``input_ids``: known by the key and by the dim, never by a length alone.

A tensor of a batch may belong to the tokens (masks, positions, embeddings), to another sequence (an encoder's, a picture's) or to a
sample, and any of them may happen to be as long as the tokens are. Legend: B samples, T positions.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError

_DECODER = re.compile(r"decoder_\w+")
_COUNTS = re.compile(r"cu_?seq_?len\w*|max_?seq_?len\w*|max_length_[qk]|seq_?len\w*|lengths?")
_OTHERS = re.compile(
    r"(encoder|pixel|audio|video|vision|visual|images?|speech|mel|src|source|memory|past|features?)(_\w+)?|input_(features|values)\w*"
)
# Of tokens that stand for a picture, or of pictures.
_UNSURE = re.compile(r"(audio|video|vision|visual|images?)_(\w+_)?masks?(?<!attention_mask)")
_ROWS = re.compile(
    r"inputs_embeds|bbox|(cross|image)_attention_mask|\w*logits|images_seq_mask"
    r"|token_(embed(ding)?s|features|states|weights?|labels|losses|scores|masks?)"
)
# Which words the field has for masks and numbers of tokens. A mask of frames, patches, nodes or experts, and rewards of steps, may happen to
# be as long.
_MASKS = re.compile(
    r"((attention|attn|causal|(causal|text|sliding|full)_(attention|attn)|loss|train(ing)?|labels?|targets?|inputs?|tokens?|special_tokens?"
    r"|(key_)?pad(ding)?|valid|ignore|prompts?|completions?|responses?|answers?|assistants?|assistant_tokens?|actions?|tools?|user|system"
    r"|generat(ion|ed)|positions?|segments?|sequences?|seq|doc(ument)?s?|text|mlm|eos)_)?masks?|(attention|attn|causal)_bias"
)
_LAST = re.compile(
    r"(input|position|token_type|mm_token_type|segment|sequence|seq|doc|document)_ids|cache_position|positions?|seq_idx"
    r"|(loss_)?weights?|labels"
    r"|((per_)?token_|old_|ref(erence)?_|policy_|teacher_|rollout_|sampling_|behaviou?r_|vllm_)*(logprobs|logps|advantages|rewards|returns)"
)


def shorten(batch: Mapping[str, Any], by: str) -> dict[str, Any]:
    """``batch`` without the last position of ``input_ids`` [B, T], in each tensor that has it; numbers and lists as they are.

    Raises:
        ConfigError: what cannot be decided, by its key.
    """
    ids = batch["input_ids"]

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):  # masks by the kind of layer
            return {key: cut(name, each) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        dims = _counted(value, ids.shape[1]) if _COUNTS.fullmatch(name) else _dims(name, value, *ids.shape)
        if dims is None:
            raise _undecided(name, value, ids, by)
        for dim in dims:
            value = value.narrow(dim, 0, ids.shape[1] - 1)
        return value.contiguous()

    for name in batch:
        if _DECODER.fullmatch(name):
            raise _of_a_decoder(name, by)
    return {name: cut(name, value) for name, value in batch.items()}


def _dims(name: str, value: Tensor, rows: int, num: int) -> tuple[int, ...] | None:
    """The dims of a tensor that are positions; None: it cannot be decided."""
    shape = tuple(value.shape)
    if num not in shape or shape == (rows,) != (num,):
        return ()
    if _ROWS.fullmatch(name) and shape[1:2] == (num,) and shape[0] in (rows, 1):
        return (1,)
    if _OTHERS.fullmatch(name):
        return None if _UNSURE.fullmatch(name) and shape[:2] == (rows, num) else ()
    if _MASKS.fullmatch(name):
        return _dims_of_mask(name, value, rows, num)
    if len(shape) == 1:
        return (-1,) if name.startswith(("position", "cache_position")) else ()
    if _LAST.fullmatch(name):
        return (-1,) if shape[-1] == num and shape[-2] in (rows, 1) else None
    return () if num not in shape[1:] else None  # the first dim is samples, or has nothing to do with them


def _dims_of_mask(name: str, value: Tensor, rows: int, num: int) -> tuple[int, ...] | None:
    """[B, T], [T, T], [B, T, T], [B, 1, T, T], [B, 1, 1, T]: the last is what is attended to, the one before what attends."""
    shape = tuple(value.shape)
    if shape[-1] != num or len(shape) == 1:
        return () if shape == (rows,) else None
    if len(shape) > 2:
        return {num: (-2, -1), 1: (-1,)}.get(shape[-2])
    if shape[0] == num == rows:  # either: by its name, or by what it holds
        if name.startswith("causal"):
            return (-2, -1)
        is_triangle = torch.equal(value != 0, torch.ones_like(value, dtype=torch.bool).tril()) or bool(
            (value < 0).any()
        )
        return None if is_triangle or name.startswith("attn") else (-1,)
    return (-1,) if shape[0] in (rows, 1) else (-2, -1) if shape[0] == num else None


def _counted(value: Tensor, num: int) -> tuple[int, ...] | None:
    """Numbers of positions, which the last position may be one of."""
    return () if not value.numel() or value.max() < num else None


def _undecided(name: str, value: Tensor, ids: Tensor, by: str) -> ConfigError:
    rest = f'{{key: value for key, value in batch.items() if key != "{name}"}}'
    return ConfigError(
        f"{name!r} of shape {list(value.shape)} in a batch for {by}, with input_ids of shape {list(ids.shape)}",
        why="the batch loses its last position, and whether this tensor has it, and in which dim or in its values, cannot be known from "
        "its name and shape",
        fix=f'say what it becomes: prepare=lambda batch: {{**sw.{by}({rest}), "{name}": batch["{name}"]}}, with [:, :-1] or the like behind '
        "the last where it has a value for each token",
    )


def _of_a_decoder(name: str, by: str) -> ConfigError:
    return ConfigError(
        f"{name!r} in a batch for {by}",
        why="the model has an encoder and a decoder: labels belong to the decoder, which is given the tokens before them, and input_ids to the "
        "encoder",
        fix="leave labels at their places: sw.Loader(..., prepare=None)",
    )
