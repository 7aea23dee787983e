"""``nn.MultiheadAttention`` with its projections as linear layers: torch computes all of it in one function, which takes the
width of a head from the number of heads, and so cannot compute some of the heads."""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import UnsupportedError
from shardwise.model.names import canonical_modules


def attentions(module: nn.Module) -> list[str]:
    """The modules within ``module`` that :func:`write_out` can change."""
    return [
        name
        for name, child in canonical_modules(module)
        if isinstance(child, nn.MultiheadAttention)
        and type(child).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(child)
        and child._qkv_same_embed_dim
        and child.bias_k is None
        and not child.add_zero_attn
    ]


def write_out(module: nn.MultiheadAttention, *, is_cut: bool) -> None:
    """Makes the forward of ``module`` compute self-attention with a linear layer for queries, keys and values together, one
    for its outputs, and as many heads as the first one's outputs make. The numbers are torch's.

    Args:
        module: changed in place.
        is_cut: its layers have a rank's part of the heads: attention to other values is refused then.
    """
    module.forward = functools.partial(_attend, module, is_cut)  # type: ignore[method-assign]
    # With a hook, torch's layers around it do not give its weights to a kernel of their own when there are no gradients.
    module.register_forward_pre_hook(lambda *_: None)


def _attend(
    module: nn.MultiheadAttention,
    is_cut: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if query is not key or key is not value or query.is_nested or (is_causal and attn_mask is None):
        if is_cut:
            raise UnsupportedError(
                "nn.MultiheadAttention that is called with other keys and values than in the example",
                why="its heads are cut over tp as self-attention, in which query, key and value are one tensor",
                fix="pass example= with a batch that takes this way, so that it is left whole",
            )
        rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return type(module).forward(module, query, key, value, *rest)
    is_batched = query.dim() == 3
    x = query if is_batched else query.unsqueeze(0)
    x = x.transpose(0, 1) if is_batched and not module.batch_first else x
    parts = functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)  # type: ignore[arg-type]
    q, k, v = (part.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for part in parts)
    chance = module.dropout if module.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = (q * module.head_dim**-0.5) @ k.mT
        mask = _mask(attn_mask, key_padding_mask, q)
        weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), chance)
        heads = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights if is_batched else weights.squeeze(0)
    elif is_causal and key_padding_mask is None:  # then torch takes the mask for a causal one
        heads = functional.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
    else:
        mask = _mask(attn_mask, key_padding_mask, q)
        heads = functional.scaled_dot_product_attention(q, k, v, mask, chance)
    y = functional.linear(heads.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if not is_batched:
        return y.squeeze(0), weights
    return (y if module.batch_first else y.transpose(0, 1)), weights


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The sum of both masks, as numbers that are added to scores [batch, heads, length, length]; None: there is none."""
    masks = []
    if attn_mask is not None:
        added = _added(attn_mask, q)
        masks.append(added if added.dim() == 2 else added.unflatten(0, (q.shape[0], -1)))
    if key_padding_mask is not None:
        added = _added(key_padding_mask, q)
        masks.append(added[..., None, None, :] if added.dim() == 2 else added)
    return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
