"""Models that are drawn: embeddings, blocks of attention and of a feed-forward or experts, and a head, each in one of several ways."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LONGEST = 24


def drawn_kind(r: random.Random) -> dict:
    """What a :class:`Drawn` is like."""
    heads, width = r.choice([2, 4]), r.choice([4, 6, 8])

    def now_and_then(chance: float) -> bool:
        return r.random() < chance

    return {
        "dim": heads * width,
        "heads": heads,
        "kv": r.choice([k for k in (1, 2, 4) if heads % k == 0]),
        "ffn": r.choice([12, 17, 32]),
        "layers": r.choice([1, 2, 3]),
        "vocab": r.choice([29, 32, 40]),
        "bias": now_and_then(0.5),
        "positions": r.choice(["rotary", "rotary", "embedding", "parameter"]),
        "written_out": now_and_then(0.3),
        "fused": now_and_then(0.3),
        "norm": r.choice(["layer", "rms"]),
        "experts": now_and_then(0.2),
        "gate": r.choice(["", "two", "fused"]),
        "scale": r.choice(["", "", "", "vector", "number"]),
        "unused": now_and_then(0.15),
        "parallel": now_and_then(0.2),
        "shared": r.choice(["", "", "", "", "", "", "", "block", "ffn"]),
        "tied": now_and_then(0.4),
        "seldom": now_and_then(0.15),
        "counts": now_and_then(0.2),
        "soft_cap": now_and_then(0.2),
    }


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Attention(nn.Module):
    def __init__(self, kind: dict):
        super().__init__()
        self.kind, self.width = kind, kind["dim"] // kind["heads"]
        self.sizes = [kind["dim"], kind["kv"] * self.width, kind["kv"] * self.width]
        if kind["fused"]:
            self.qkv = nn.Linear(kind["dim"], sum(self.sizes), bias=kind["bias"])
        else:
            self.q, self.k, self.v = (nn.Linear(kind["dim"], size, bias=kind["bias"]) for size in self.sizes)
        self.out = nn.Linear(kind["dim"], kind["dim"], bias=kind["bias"])

    def forward(self, x, angles):
        of_all = self.qkv(x).split(self.sizes, -1) if self.kind["fused"] else (self.q(x), self.k(x), self.v(x))
        q, k, v = (each.unflatten(-1, (-1, self.width)).transpose(1, 2) for each in of_all)
        if angles is not None:
            q, k = turned(q, angles), turned(k, angles)
        times = self.kind["heads"] // self.kind["kv"]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        if self.kind["written_out"]:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            y = (q @ k.mT / self.width**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, kind: dict, gate: str | None = None):
        super().__init__()
        self.gate_kind, ffn = kind["gate"] if gate is None else gate, kind["ffn"]
        self.up = nn.Linear(kind["dim"], ffn * (2 if self.gate_kind == "fused" else 1), bias=kind["bias"])
        if self.gate_kind == "two":
            self.gate = nn.Linear(kind["dim"], ffn, bias=kind["bias"])
        self.down = nn.Linear(ffn, kind["dim"], bias=kind["bias"])

    def forward(self, x):
        if self.gate_kind == "fused":
            a, b = self.up(x).chunk(2, -1)
            return self.down(F.silu(a) * b)
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.gate_kind == "two" else F.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token runs through one expert; some have none in a micro-batch."""

    def __init__(self, kind: dict):
        super().__init__()
        self.router = nn.Linear(kind["dim"], 3, bias=False)
        self.experts = nn.ModuleList(FeedForward(kind, "") for _ in range(3))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            at = chosen == index
            if at.any():
                y[at] = expert(x[at]) * weight[at].unsqueeze(-1)
        return y


class Block(nn.Module):
    def __init__(self, kind: dict):
        super().__init__()
        of_norm = nn.LayerNorm if kind["norm"] == "layer" else Norm
        self.norm1, self.norm2, self.kind = of_norm(kind["dim"]), of_norm(kind["dim"]), kind
        self.attention = Attention(kind)
        self.ffn = Experts(kind) if kind["experts"] else FeedForward(kind)
        if kind["scale"]:
            self.scale = nn.Parameter(torch.rand(kind["dim"]) if kind["scale"] == "vector" else torch.tensor(0.7))
        if kind["unused"]:
            self.spare = nn.Linear(kind["dim"], 3)

    def forward(self, x, angles):
        attended = self.attention(self.norm1(x), angles)
        if self.kind["parallel"]:
            return x + attended + self.ffn(self.norm2(x))
        x = x + (attended * self.scale if self.kind["scale"] else attended)
        return x + self.ffn(self.norm2(x))


class Drawn(nn.Module):
    """Logits [batch, length, vocab] of token ids."""

    def __init__(self, kind: dict):
        super().__init__()
        dim, self.kind = kind["dim"], kind
        self.tokens = nn.Embedding(kind["vocab"], dim)
        if kind["positions"] == "parameter":
            self.places = nn.Parameter(torch.randn(LONGEST, dim) * 0.1)
        elif kind["positions"] == "embedding":
            self.places = nn.Embedding(LONGEST, dim)
        blocks = [Block(kind) for _ in range(kind["layers"])]
        if kind["shared"] == "block":
            blocks[-1] = blocks[0]
        elif kind["shared"] == "ffn":
            blocks[-1].ffn = blocks[0].ffn
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim) if kind["norm"] == "layer" else Norm(dim)
        self.head = nn.Linear(dim, kind["vocab"], bias=kind["bias"])
        if kind["tied"]:
            self.head.weight = self.tokens.weight
        if kind["seldom"]:
            self.seldom = nn.Linear(dim, dim)
        if kind["counts"]:
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, input_ids):
        x, angles, positions = self.tokens(input_ids), None, torch.arange(input_ids.shape[1], device=input_ids.device)
        if self.kind["positions"] == "rotary":
            width = self.kind["dim"] // self.kind["heads"]
            angles = positions[:, None] * 100.0 ** -(torch.arange(0, width, 2, device=x.device).to(x.dtype) / width)
        elif self.kind["positions"] == "parameter":
            x = x + self.places[: input_ids.shape[1]]
        else:
            x = x + self.places(positions)
        if self.kind["seldom"] and bool(input_ids[0, 0] % 2 == 0):
            x = x + self.seldom(x)
        if self.kind["counts"] and self.training:
            self.seen.add_(input_ids.numel())
        for block in self.blocks:
            x = block(x, angles)
        y = self.head(self.norm(x))
        return 5 * torch.tanh(y / 5) if self.kind["soft_cap"] else y


def build(kind: dict, seed: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Drawn(kind).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.05)
    return model
