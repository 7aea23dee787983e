"""Models of torch's own attention and encoder layers."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from models.batches import VOCAB, tokens
from models.record import Model

WIDTH = 16


class Encoder(nn.Module):
    """``nn.TransformerEncoder``; ``causal``: with a mask; ``pads``: with a mask of padding, from the tokens."""

    def __init__(self, causal: bool = False, pads: bool = False, **options: Any):
        super().__init__()
        given = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True, **options}
        layer = nn.TransformerEncoderLayer(WIDTH, 4, **given)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.encoder, self.batch_first = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            given["batch_first"],
        )
        self.causal, self.pads = causal, pads

    def forward(self, input_ids: Tensor) -> Tensor:
        x, length = self.embed(input_ids), input_ids.shape[1]
        x = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype) if self.causal else None
        pads = None
        if self.pads:
            pads = torch.zeros(x.shape[:2], dtype=x.dtype).masked_fill(input_ids == 3, float("-inf"))
            pads[:, 0] = 0
        x = self.encoder(x, mask, pads, is_causal=self.causal)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class Averaged(nn.Module):
    """The weights of attention, averaged over the heads, are in what a block gives."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.embed, self.head, self.used = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), used
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            h = norm(x)
            y, weights = block(h, h, h)
            x = x + y + (weights @ h if self.used else 0)
        return self.head(x)


class Crossed(nn.Module):
    """Attention to other values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, other = self.embed(input_ids), self.other(input_ids)
        return self.head(torch.tanh(x + self.attention(x, other, other, need_weights=False)[0]))


def _model(name: str, build: Any) -> Model:
    return Model(name=f"torch attention: {name}", build=build, batch=tokens, tags=("own", "torch attention"))


MODELS = (
    _model("encoder", Encoder),
    _model("length first, norms first", functools.partial(Encoder, batch_first=False, norm_first=True, bias=False)),
    _model("causal, padded", functools.partial(Encoder, causal=True, pads=True, activation="gelu")),
    _model("weights", functools.partial(Averaged, used=False)),
    _model("weights in use", functools.partial(Averaged, used=True)),
    _model("crossed", Crossed),
)
