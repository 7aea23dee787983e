"""Models whose attention is written out in products, and some that only look so."""

import math

import torch
import torch.nn.functional as F
from techniques.cp.sequences import HEADS, VOCAB, WIDTH, heads
from torch import Tensor, nn


class Written(nn.Module):
    """Attention in the way that its name says."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.num = how, 0
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.distances, self.drop = nn.Embedding(16, HEADS), nn.Dropout(0.4)
        self.gate = nn.Linear(WIDTH, 1)
        self.register_buffer("table", torch.ones(48, 48).tril()[None, None])

    def forward(self, x: Tensor, alibi: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        how, num = self.how, x.shape[1]
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        if how == "keys of the length":
            k = k * math.log(num)
        if how == "values of the length":
            v = v + num
        if how == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        elif how == "flat":
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(len(x), HEADS, num, -1)
        elif how == "alibi":
            bias = alibi.expand(len(x), -1, -1, -1).flatten(0, 1)
            scores = bias.baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=0.3).unflatten(0, (-1, HEADS))
        elif how == "samples":
            scores = torch.einsum("bhtd,chtd->htbc", q, k)
            return self.out(torch.einsum("htbc,chtd->bthd", scores.softmax(-1), v).flatten(2)), scores
        else:
            scores = q @ k.mT
        scores = scores / 8**0.5
        if how == "distances":
            far = torch.arange(num)[:, None] - torch.arange(num)[None]
            scores = scores + self.distances(far.clamp(0, 15)).permute(2, 0, 1)
        if how == "length":
            scores = scores * math.log(num)
        if how == "positions":
            scores = scores + torch.arange(num).flip(0)
        if how == "tril":
            scores = scores.masked_fill(torch.tril(torch.ones(num, num)) == 0, -torch.inf)
        elif how == "triu":
            scores = scores + torch.full((num, num), -torch.inf).triu(1)
        elif how == "checked":
            if k.shape[2] != mask.shape[-1]:
                raise ValueError(f"keys {k.shape[2]}, for a mask of {mask.shape[-1]}")
            scores = scores + mask
        elif how in ("argument", "alibi"):
            scores = scores + mask
        elif how != "both ways":
            scores = scores.masked_fill(self.table[:, :, :num, :num] == 0, -1e30)
        if how == "best":
            least = scores.topk(3, -1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -1e30)
        if how == "over heads":
            weights = scores.softmax(1)
        elif how == "over queries":
            weights = scores.softmax(2)
        elif how == "float32":
            weights = scores.float().softmax(-1).to(x.dtype)
        else:
            weights = scores.softmax(-1)[..., : k.shape[2]]
        if how == "dropped":
            weights = self.drop(weights)
        y = torch.einsum("bhqk,bhkd->bhqd", weights, v) if how == "einsum" else weights @ v
        if how == "gated":
            y = y * scores.clamp(-9, 9).mean(-1, keepdim=True).sigmoid()
        if how == "gated by all":
            y = y * scores.clamp(-9, 9).mean((2, 3), keepdim=True).sigmoid()
        return self.out(y.transpose(1, 2).flatten(2)), weights


class Layer(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.norm, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Written(how), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, alibi: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(self.norm(x), alibi, mask)
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm2(x)))), weights


class Speaker(nn.Module):
    """A model of words. ``how``: see :class:`Written`; ``weights``: it returns those of the last attention too."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.tokens, self.places = how, nn.Embedding(VOCAB, WIDTH), nn.Embedding(48, WIDTH)
        self.blocks = nn.ModuleList(Layer(how) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor):
        at = torch.arange(input_ids.shape[1])
        x = self.tokens(input_ids) + self.places(at)
        mask = torch.zeros(len(at), len(at), dtype=x.dtype).masked_fill(at[:, None] < at, -1e30)
        alibi = (torch.tensor([0.5, 0.2, 0.1, 0.05])[:, None, None] * at).to(x.dtype)
        for block in self.blocks:
            x, weights = block(x, alibi, mask)
        output = self.head(self.norm(x))
        return (output, weights) if self.how == "weights" else output


class Rolled(nn.Module):
    """A block that moves what a layer makes of its tokens, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        return self.layer(x).roll(1, 1), None


EQUAL = [
    "table", "einsum", "flat", "alibi", "distances", "tril", "triu", "checked", "argument", "both ways", "best", "over heads",
    "float32", "dropped", "gated", "weights", "samples", "positions",
]  # fmt: skip
"""Those that are equal under cp."""

REFUSED = ["length", "keys of the length", "values of the length", "over queries", "gated by all"]
"""Those whose attention is named."""


def build(how: str, dtype: torch.dtype = torch.float64) -> Speaker:
    generator = torch.Generator().manual_seed(1)
    model = Speaker(how).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator, dtype=dtype))
    return model
