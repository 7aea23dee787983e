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
        self.gate, self.relative = nn.Linear(WIDTH, 1), Relative()
        self.register_buffer("table", torch.ones(48, 48).tril()[None, None])
        self.register_buffer("scales", torch.rand(50, 8, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, alibi: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        how, num = self.how, x.shape[1]
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        if how == "relative":
            y = F.scaled_dot_product_attention(q, k, v, self.relative(x, mask)[:, None])
            return self.out(y.transpose(1, 2).flatten(2)), mask
        if how == "viewed":
            layers = (self.q, self.k, self.v)
            q, k, v = (layer(x).view(len(x), num, HEADS, WIDTH // HEADS).transpose(1, 2) for layer in layers)
        if how == "ends":
            q, k = q * self.scales[-num:], k * self.scales[50 - num :]
        if how == "drawn" and self.training:
            q = q * (1 + 0.1 * torch.rand_like(q))
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
        elif how == "viewed":
            if scores.shape[2:] != (num, k.shape[2]) or mask.shape != (num, k.shape[2]):
                raise ValueError(f"scores {tuple(scores.shape)} and a mask {tuple(mask.shape)}, for {k.shape[2]} keys")
            scores = scores + mask
        elif how == "prompted":
            scores = scores + mask.view(1, 1, num, num)
        elif how == "ends":
            scores = scores + mask + alibi[:, :, max(0, alibi.shape[2] - k.shape[2]) :]
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


class Relative(nn.Module):
    """A bias by how far a key is from its query, for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, far: Tensor) -> Tensor:
        bias = self.layer(x).gather(-1, far.clamp(0, 15).expand(len(x), -1, -1))
        return bias.masked_fill(far < 0, -torch.inf)


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
        self.num_prompt = 5 if how == "prompted" else 0
        self.prompt = nn.Parameter(torch.zeros(5, WIDTH)) if self.num_prompt else None

    def forward(self, input_ids: Tensor):
        x = self.tokens(input_ids)
        if self.prompt is not None:
            x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
        at = torch.arange(x.shape[1])
        x = x + self.places(at)
        mask = torch.zeros(len(at), len(at), dtype=x.dtype).masked_fill(at[:, None] < at, -1e30)
        alibi = (torch.tensor([0.5, 0.2, 0.1, 0.05])[:, None, None] * at).to(x.dtype)
        if self.how == "relative":
            mask = at[:, None] - at
        for block in self.blocks:
            x, weights = block(x, alibi, mask)
        output = self.head(self.norm(x[:, self.num_prompt :]))
        return (output, weights) if self.how == "weights" else output


class Rolled(nn.Module):
    """A block that moves what a layer makes of its tokens, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        return self.layer(x).roll(1, 1), None


class Shift(nn.Module):
    """Each token gets the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)


class Inner(nn.Module):
    """A block whose attention is given what a module within it shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(WIDTH, WIDTH), Shift()

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        y = heads(self.shift(self.layer(x)))
        return x + F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2), None


EQUAL = [
    "table", "einsum", "flat", "alibi", "distances", "tril", "triu", "checked", "argument", "both ways", "best", "over heads",
    "float32", "dropped", "gated", "weights", "samples", "positions", "relative", "viewed", "ends", "prompted",
]  # fmt: skip
"""Those that are equal under cp."""

REFUSED = ["length", "keys of the length", "values of the length", "over queries", "gated by all", "drawn"]
"""Those whose attention is named."""


def build(how: str, dtype: torch.dtype = torch.float64) -> Speaker:
    generator = torch.Generator().manual_seed(1)
    model = Speaker(how).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator, dtype=dtype))
    return model
