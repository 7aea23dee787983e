"""Blocks that put linear layers together in every way that models do: what tensor parallelism has to find and to cut."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import VOCAB, tokens
from models.record import Model

WIDTH, HEADS, HEAD, LENGTH = 16, 4, 4, 6


class Projection(nn.Module):
    """x @ weight + bias, with the weight as GPT-2 has it: inputs first."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.num_out = num_out
        self.weight, self.bias = nn.Parameter(torch.randn(num_in, num_out) / 4), nn.Parameter(torch.randn(num_out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], self.num_out)


class Transposed(nn.Linear):
    """A linear layer whose forward is written out."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Lora(nn.Module):
    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.base, self.low, self.high = nn.Linear(num_in, num_out), nn.Linear(num_in, 2), nn.Linear(2, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.high(self.low(x))


class Added(nn.Module):
    """Adds a product of two thin matrices to a weight."""

    def __init__(self, num_out: int, num_in: int):
        super().__init__()
        self.high, self.low = nn.Parameter(torch.randn(num_out, 2) / 4), nn.Parameter(torch.randn(2, num_in) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.high @ self.low


def hooked(num_in: int, num_out: int) -> nn.Module:
    """A linear layer with hooks on what it is given, and on what it returns."""
    layer = nn.Linear(num_in, num_out)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
    layer.register_forward_hook(lambda module, args, y: y * 0.9 + 0.1)
    return layer


def weight_norm(num_in: int, num_out: int, made: type[nn.Linear] = nn.Linear) -> nn.Module:
    """A linear layer whose weight is computed from a direction and a length for each output."""
    return nn.utils.parametrizations.weight_norm(made(num_in, num_out))


def spectral_norm(num_in: int, num_out: int) -> nn.Module:
    """A linear layer whose weight is divided by its largest singular value, of which it keeps an estimate in buffers."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(num_in, num_out, bias=False))


def added(num_in: int, num_out: int) -> nn.Module:
    """A linear layer with a trained addition to its weight."""
    layer = nn.Linear(num_in, num_out)
    nn.utils.parametrize.register_parametrization(layer, "weight", Added(num_out, num_in))
    return layer


class Attention(nn.Module):
    """Args:
    layout: how q, k and v lie in one layer ("qkv": one after the other; "heads": q, k, v of a head, then of the next;
        "groups": the queries of a key/value head, its key, its value), or "" for three layers.
    num_kv: number of key/value heads.
    layer: makes a linear layer.
    norm: "head" for a norm of each head's queries, "width" of all heads' together.
    sinks: with a learned logit for each head that takes attention away.
    tempered: with a learned number by which all scores are multiplied.
    """

    def __init__(
        self,
        layout: str = "",
        num_kv: int = HEADS,
        layer: Callable[[int, int], nn.Module] = nn.Linear,
        norm: str = "",
        sinks: bool = False,
        tempered: bool = False,
    ):
        super().__init__()
        self.layout, self.num_heads, self.num_kv, self.head_dim = layout, HEADS, num_kv, HEAD
        rows = [HEADS * HEAD, num_kv * HEAD, num_kv * HEAD]
        self.projections = nn.ModuleList([layer(WIDTH, sum(rows))] if layout else [layer(WIDTH, n) for n in rows])
        self.out = layer(HEADS * HEAD, WIDTH)
        self.norm = nn.LayerNorm({"head": HEAD, "width": HEADS * HEAD}[norm]) if norm else None
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None
        self.temperature = nn.Parameter(torch.tensor(0.7)) if tempered else None

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, d = *x.shape[:2], self.head_dim
        found = [projection(x) for projection in self.projections]
        if self.layout == "heads":
            q, k, v = found[0].view(batch, length, -1, 3, d).unbind(3)
        elif self.layout == "groups":
            each = found[0].view(batch, length, self.num_kv, -1, d)
            q, k, v = each[:, :, :, :-2].flatten(2, 3), each[:, :, :, -2], each[:, :, :, -1]
        else:
            sizes = [self.num_heads * d, self.num_kv * d, self.num_kv * d]
            parts = found[0].split(sizes, -1) if self.layout else found
            if self.norm is not None and self.norm.normalized_shape[0] > d:
                parts = [self.norm(parts[0]), *parts[1:]]
            q, k, v = (part.view(batch, length, -1, d) for part in parts)
        if self.norm is not None and self.norm.normalized_shape[0] == d:
            q = self.norm(q)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        scores = q @ k.mT / self.head_dim**0.5
        if self.temperature is not None:
            scores = scores * self.temperature
        if bias is not None:
            scores = scores + bias
        if self.sinks is not None:
            sink = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """``kind``: "plain", "gated" (two layers), "halves" (gate and up in one layer), "scaled" (by a parameter for each
    feature), "normed" (over all features), "dropped"."""

    def __init__(self, kind: str = "plain", layer: Callable[[int, int], nn.Module] = nn.Linear):
        super().__init__()
        self.kind, hidden = kind, 2 * WIDTH
        self.up = layer(WIDTH, 2 * hidden if kind == "halves" else hidden)
        self.gate = layer(WIDTH, hidden) if kind == "gated" else None
        self.scale = nn.Parameter(torch.randn(hidden)) if kind == "scaled" else None
        self.norm = nn.LayerNorm(hidden) if kind == "normed" else None
        self.down = layer(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "halves":
            gate, h = h.chunk(2, -1)
            h = F.silu(gate) * h
        h = F.silu(self.gate(x)) * h if self.gate is not None else F.relu(h)
        h = h * self.scale if self.scale is not None else h
        h = self.norm(h) if self.norm is not None else F.dropout(h, 0.5, self.training and self.kind == "dropped")
        return self.down(h)


class KeptMlp(nn.Module):
    """Keeps its forward as a function that uses modules, as minGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = m = nn.ModuleDict({"up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})
        self.last = nn.LayerNorm(WIDTH)
        self.call = lambda x, act=F.gelu, last=self.last: last(m.down(act(m.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class RawMlp(nn.Module):
    """Weights without layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, 32) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down, self.bias)


class Steered(nn.Module):
    """What is between its layers is scaled by its input, which its first layer takes too; with a residual inside, its
    output does as well."""

    def __init__(self, residual: bool = False):
        super().__init__()
        self.residual, self.norm, self.gain = residual, nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor([1.3]))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(self.norm(x))) * torch.sigmoid(self.gain * x[..., ::3].sum(-1, keepdim=True)))
        return x + y if self.residual else y


class LooksAtItsWeight(nn.Module):
    """Its own weight is also a penalty in what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))) * self.up.weight.norm()


class FromTheWidth(nn.Module):
    """Attention that takes the sizes of heads from its input, as nanoGPT does."""

    def __init__(self, layer: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = layer(WIDTH, 3 * WIDTH), layer(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for y in parts)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Latent(nn.Module):
    """Attention over a small vector for each position, part of which goes to all heads directly (MLA of DeepSeek)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, HEADS * 2 * HEAD), nn.Linear(WIDTH, 6 + HEAD)
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, HEADS * 2 * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        small, shared = self.down(x).split([6, HEAD], -1)
        q = self.q(x).view(batch, length, -1, 2 * HEAD).transpose(1, 2)
        k, v = self.up(self.norm(small)).view(batch, length, -1, 2 * HEAD).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, shared[:, None].expand(k.shape)], -1)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Args:
    attention, mlp: make them.
    parallel: both read the same input.
    bias: the attention gets a number for each head, made by the model.
    """

    def __init__(
        self,
        attention: Callable[[], nn.Module] = Attention,
        mlp: Callable[[], nn.Module] = Mlp,
        parallel: bool = False,
    ):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp, self.parallel = attention(), mlp(), parallel

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.before(x)
        attended = self.attention(y) if bias is None else self.attention(y, bias)
        if self.parallel:
            return x + attended + self.mlp(y)
        x = x + attended
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """``bias``: of each head by distance, "slopes" (a buffer, as ALiBi has), "table" (learned, as T5 has)."""

    def __init__(self, bias: str = "", **options: Any):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.kind = bias
        if bias == "slopes":
            self.register_buffer("slopes", torch.linspace(0.1, 1, HEADS))
        self.table = nn.Parameter(torch.randn(2 * LENGTH, HEADS)) if bias == "table" else None

    def bias(self, length: int) -> Tensor | None:
        places = torch.arange(length, device=self.embed.weight.device)
        distance = places[:, None] - places
        if self.kind == "slopes":
            return self.slopes[:, None, None] * distance
        return self.table[distance + LENGTH].permute(2, 0, 1) if self.table is not None else None

    def forward(self, input_ids: Tensor) -> Tensor:
        x, bias = self.embed(input_ids), self.bias(input_ids.shape[1])
        for block in self.blocks:
            x = block(x) if bias is None else block(x, bias)
        return self.head(self.norm(x))


class Keeps(nn.Module):
    """Keeps a number for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mlp, self.penalty = Mlp(), None

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        hidden = F.relu(self.mlp.up(F.layer_norm(x, (WIDTH,))))
        self.penalty = hidden.mean()
        return self.head(F.layer_norm(x + self.mlp.down(hidden), (WIDTH,)))


class UsedTwice(nn.Module):
    """A number that is used in an MLP, and for the output too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mlp, self.number = Mlp(), nn.Parameter(torch.tensor([0.7]))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.mlp.down(F.relu(self.mlp.up(F.layer_norm(x, (WIDTH,)))) * self.number)
        return self.head(x) * self.number


class ValueResidual(nn.Module):
    """The values of the first block are added to those of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x, first = self.embed(input_ids), None
        for block in self.blocks:
            q, k, v = block.heads(x)
            first = v if first is None else first
            x = x + block.out(((q @ k.mT).softmax(-1) @ (v + first)).transpose(1, 2).flatten(2))
        return self.head(x)


class InPlace(nn.Module):
    """Changes what its embedding and every layer return, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attention, self.norm, self.mlp = Attention(num_kv=1), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).mul_(2)
        q, k, v = self.attention.heads(x)
        values = (q.mul_(0.5) @ k.add_(1).mT).softmax(-1) @ v.tanh_()
        x = self.attention.out(values.transpose(1, 2).flatten(2)).add_(x)
        x = self.mlp.down(self.mlp.up(self.norm(x)).relu_()).add_(x)
        logits = self.head(x)
        logits[..., 0] = -4
        return logits.mul_(0.5)


class Mixer(nn.Module):
    """Layers over positions, and layers over features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.over_positions = nn.ModuleList([nn.Linear(LENGTH, 8), nn.Linear(8, LENGTH)])
        self.over_features = nn.ModuleList([nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layers, turned in ((self.over_positions, True), (self.over_features, False)):
            y = layers[1](F.relu(layers[0](x.mT if turned else x)))
            x = x + (y.mT if turned else y)
        return self.head(x)


class Chain(nn.Sequential):
    """Layers one after the other, without anything beside them."""

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH if i < 3 else VOCAB) for i in range(4)]
        super().__init__(nn.Embedding(VOCAB, WIDTH), *(x for layer in layers for x in (layer, nn.Tanh())))

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def _attention(**options: Any) -> Callable[[], nn.Module]:
    return functools.partial(Attention, **options)


def _mlp(kind: str, layer: Callable[[int, int], nn.Module] = nn.Linear) -> Callable[[], nn.Module]:
    return functools.partial(Mlp, kind, layer)


_DECODERS: dict[str, dict[str, Any]] = {
    "apart": {},
    "kv-2": {"attention": _attention(num_kv=2)},
    "kv-1": {"attention": _attention(num_kv=1)},
    "qkv": {"attention": _attention(layout="qkv"), "mlp": _mlp("gated")},
    "qkv-kv-2": {"attention": _attention(layout="qkv", num_kv=2), "mlp": _mlp("halves")},
    "qkv-kv-1": {"attention": _attention(layout="qkv", num_kv=1)},
    "per-head": {"attention": _attention(layout="heads"), "mlp": _mlp("scaled")},
    "grouped": {"attention": _attention(layout="groups", num_kv=2)},
    "turned-weights": {"attention": _attention(layout="qkv", layer=Projection), "mlp": _mlp("plain", Projection)},
    "written-out": {"attention": _attention(layer=Transposed), "mlp": _mlp("gated", Transposed)},
    "lora": {"attention": _attention(layer=Lora), "mlp": _mlp("gated", Lora)},
    "weight-norm": {
        "attention": _attention(layout="qkv", num_kv=1, layer=weight_norm),
        "mlp": _mlp("gated", weight_norm),
    },
    "spectral-norm": {"attention": _attention(layer=spectral_norm), "mlp": _mlp("plain", spectral_norm)},
    "added": {"attention": _attention(num_kv=2, layer=added), "mlp": _mlp("halves", added)},
    "hooked": {"attention": _attention(num_kv=1, layer=hooked), "mlp": _mlp("gated", hooked)},
    "raw-weights": {"mlp": RawMlp},
    "kept-function": {"mlp": KeptMlp},
    "norm-of-heads": {"attention": _attention(norm="head"), "mlp": _mlp("dropped")},
    "norm-of-width": {"attention": _attention(norm="width"), "mlp": _mlp("normed")},
    "sinks": {"attention": _attention(sinks=True)},
    "tempered": {"attention": _attention(tempered=True)},
    "from-the-width": {"attention": FromTheWidth},
    "from-the-width, lora": {"attention": functools.partial(FromTheWidth, Lora)},
    "latent": {"attention": Latent},
    "parallel": {"parallel": True},
    "slopes": {"bias": "slopes"},
    "table": {"bias": "table"},
    "looks-at-weight": {"mlp": LooksAtItsWeight},
    "steered": {"mlp": Steered},
    "steered-residual": {"mlp": functools.partial(Steered, residual=True)},
}


def _model(name: str, build: Callable[[], nn.Module]) -> Model:
    return Model(name=f"linears: {name}", build=build, batch=tokens, tags=("own", "linears"))


class SharedBlock(Decoder):
    """One block, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


MODELS = (
    *(_model(name, functools.partial(Decoder, **options)) for name, options in _DECODERS.items()),
    _model("value-residual", ValueResidual),
    _model("used-twice", UsedTwice),
    _model("keeps", Keeps),
    _model("in-place", InPlace),
    _model("mixer", Mixer),
    _model("chain", Chain),
    _model("shared-block", SharedBlock),
)
