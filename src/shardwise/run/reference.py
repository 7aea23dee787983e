"""The reference model, a small language model like Llama: rotary positions, grouped queries, RMSNorm, SwiGLU; bytes as
tokens.

A plain ``nn.Module`` that knows nothing of Shardwise: no base class, no flags, a loop over ``self.blocks``. Every
parameter and buffer is written by a ``reset_parameters`` method of the module that owns it, so the model can be built
on the meta device and filled later. It runs in fp32, bf16 and fp64.

Suffixes of tensor names: B batch, T positions, D model width, F width of the feed-forward, V vocabulary, N query
heads, K key and value heads, H width of a head.
"""
# ruff: noqa: N803, N806, N815 (the suffixes are capitals)

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.run.reference_config import ReferenceConfig


class Linear(nn.Linear):
    """A linear layer without bias, initialised from a normal distribution of standard deviation ``std``."""

    def __init__(self, dim_in: int, dim_out: int, std: float):
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(dim_in, dim_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """An embedding table, initialised from a normal distribution of standard deviation ``std``."""

    def __init__(self, num: int, dim: int, std: float):
        self.std = std
        super().__init__(num, dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Rotary(nn.Module):
    """Rotary position embedding: rotates pairs of channels by an angle that grows with the position; the table stays
    fp32."""

    cos_TH: Tensor
    sin_TH: Tensor

    def __init__(self, head_dim: int, max_seq: int, base: float):
        super().__init__()
        self.head_dim, self.max_seq, self.base = head_dim, max_seq, base
        shape = (max_seq, head_dim // 2)
        self.register_buffer("cos_TH", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_TH", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        device = self.cos_TH.device
        # Computed in fp64, so that the fp32 table is the nearest one on every device.
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        angle_TH = torch.outer(torch.arange(self.max_seq, dtype=torch.float64, device=device), self.base**-steps)
        with torch.no_grad():
            self.cos_TH.copy_(angle_TH.cos())
            self.sin_TH.copy_(angle_TH.sin())

    def forward(self, x_BNTH: Tensor) -> Tensor:
        cos, sin = self.cos_TH[: x_BNTH.shape[2]], self.sin_TH[: x_BNTH.shape[2]]
        a, b = x_BNTH.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BNTH)


class Attention(nn.Module):
    """Causal grouped-query attention: each key and value head serves several query heads."""

    def __init__(self, config: ReferenceConfig, std: float, std_out: float):
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.q = Linear(config.dim, config.num_heads * self.head_dim, std)
        self.k = Linear(config.dim, config.num_kv_heads * self.head_dim, std)
        self.v = Linear(config.dim, config.num_kv_heads * self.head_dim, std)
        self.out = Linear(config.num_heads * self.head_dim, config.dim, std_out)
        self.rotary = Rotary(self.head_dim, config.max_seq, config.rope_base)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BNTH, k_BKTH, v_BKTH = (
            proj(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        q_BNTH, k_BKTH = self.rotary(q_BNTH), self.rotary(k_BKTH)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True)
        return self.out(y_BNTH.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """The SwiGLU feed-forward layer: one branch gates the other."""

    def __init__(self, config: ReferenceConfig, std: float, std_out: float):
        super().__init__()
        self.gate = Linear(config.dim, config.ffn, std)
        self.up = Linear(config.dim, config.ffn, std)
        self.down = Linear(config.ffn, config.dim, std_out)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """A transformer block: attention, then feed-forward, each on a normalised copy and added to the residual stream."""

    def __init__(self, config: ReferenceConfig):
        super().__init__()
        std = config.dim**-0.5 / 2
        # Each block adds to the stream twice: scaled down, so that it does not grow with the depth.
        std_out = std / math.sqrt(2 * config.num_layers)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, std, std_out)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config, std, std_out)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class ReferenceModel(nn.Module):
    """The reference decoder-only language model: ``forward(input_ids [B, T]) -> logits [B, T, V]``."""

    def __init__(self, config: ReferenceConfig | None = None):
        super().__init__()
        self.config = config = config or ReferenceConfig()
        std = config.dim**-0.5 / 2
        self.embed = Embedding(config.vocab, config.dim, std)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocab, std)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def build(**sizes: int | float | bool) -> ReferenceModel:
    """Builds the model from the fields of :class:`ReferenceConfig`; a config can name this function as
    ``model.build``."""
    return ReferenceModel(ReferenceConfig(**sizes))  # type: ignore[arg-type]
