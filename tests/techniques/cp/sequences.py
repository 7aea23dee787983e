"""Small models of sequences, each of whose blocks mixes positions in one way of its own; and what trains them in one process."""

import torch
import torch.nn.functional as F
from techniques.tp.streams import BY_ROWS, WHOLE, OwnGradients
from torch import Tensor, nn

VOCAB, WIDTH, HEADS = 61, 32, 4


def heads(x: Tensor, num: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], num, -1).transpose(1, 2)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding."""
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def positions_of(num: int) -> Tensor:
    """A function that is called at several places."""
    return torch.arange(num)


def own_kernel(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
    """Causal attention written out, as a kernel for ``sw.attend``."""
    rows = torch.arange(q.shape[-2]) if rows is None else rows
    scores = (q @ k.mT / 8**0.5).masked_fill(rows[:, None] < torch.arange(k.shape[-2]), -torch.inf)
    return scores.softmax(-1) @ v


class Clock(nn.Module):
    """Makes positions, and looks at a slice, for a module that is not above it, or not right above it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x[:, : x.shape[1]].shape[1])


CLOCK = Clock()  # of no block


def observe(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
    """A hook that does to what a layer returns what its caller does too."""
    torch.arange(3)
    assert torch.arange(output.shape[1]).shape == output[:, : output.shape[1]].shape[1:2]
    assert (output.detach().mT @ output.detach()).dim() == 3


class Attention(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.kv = kind, 2 if kind == "grouped" else HEADS
        self.cache, self.num_calls = None, 0
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 16 * self.kv), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(48, 8, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("causal", torch.ones(48, 48).tril().bool())
        if kind == "others' positions":
            self.inner = nn.ModuleList([nn.Module()])
            self.inner[0].clock = Clock()
            self.qkv.register_forward_hook(observe)
            self.qkv.register_forward_pre_hook(lambda module, args: observe(module, args, args[0]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        import shardwise as sw

        num = x.size(1)
        q, k, v = self.qkv(x).split([WIDTH, 8 * self.kv, 8 * self.kv], -1)
        q, k, v = heads(q), heads(k, self.kv), heads(v, self.kv)
        if self.kind == "others' positions":
            outer, inner = CLOCK(x), self.inner[0].clock(x)
            q, k = turned(q, outer), turned(k, inner)
        if self.kind == "by branches":
            if self.cache is None:  # in the first forward alone
                self.cache = positions_of(64).sin() * 0
            if self.training or torch.is_grad_enabled():
                torch.arange(1001)
            if num > 12 or float(x.detach().flatten()[0]) > 0:
                torch.arange(1000)
        if self.kind == "every third forward":
            self.num_calls += 1
            if self.num_calls % 3 == 0:
                q = q + 0 * torch.arange(num)[:, None]
        if self.kind in ("rotary", "others' positions", "by branches", "every third forward"):
            positions = positions_of(num)
            q, k = turned(q, positions), turned(k, positions)
        if self.kind == "rows of a table":
            q, k = q * self.table[:num], k * self.table.narrow(0, 0, num)
        if self.kind == "log of the length":
            q = q * torch.log(torch.tensor(float(num)))
        if self.kind == "manual":
            y = (q @ k.mT / 8**0.5).masked_fill(~self.causal[:num, :num], -torch.inf).softmax(-1) @ v
        elif self.kind == "kernel":
            y = sw.attend(own_kernel, q, k, v)
        elif self.kind == "mask in attention":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.causal[:num, :num])
        else:
            gqa = {"enable_gqa": True} if self.kind == "grouped" else {}
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **gqa)
        if self.kind == "no eps":
            y = y / y.norm(dim=-1, keepdim=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind: str, extra: str):
        super().__init__()
        self.norm, self.attention, self.extra = nn.LayerNorm(WIDTH), Attention(kind), extra
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH) if extra == "convolution" else None
        self.batch_norm = nn.BatchNorm1d(WIDTH, track_running_stats=False) if extra == "batch norm" else None
        self.drop = nn.Dropout(0.4) if extra == "dropout" else nn.Identity()
        self.route = nn.Linear(WIDTH, 1) if extra == "best half" else None
        self.own = OwnGradients(extra, WIDTH) if extra in {*WHOLE, *BY_ROWS} else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        h = self.norm2(x)
        if self.extra == "token shift":
            h = h + F.pad(h, (0, 0, 1, -1))
        if self.conv is not None:
            h = self.conv(F.pad(h.mT, (2, 0))).mT
        if self.batch_norm is not None:
            h = self.batch_norm(h.flatten(0, 1)).view_as(h)
        if self.extra == "running mean":
            h = h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]
        h = self.own(self.drop(h))
        y = self.down(F.gelu(self.up(h)))
        if self.route is not None:
            score = self.route(h).squeeze(-1)
            y = y * (score >= score.topk(score.shape[1] // 2, 1).values[:, -1:]).unsqueeze(-1)
        return x + y


class Words(nn.Module):
    """A tied head, learned positions, documents where ``position_ids`` begin anew. ``pools``: one output for each sample."""

    def __init__(self, kind: str = "", extra: str = "", *, packs: bool = False, pools: bool = False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(48, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, extra) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight, self.packs, self.pools = self.tokens.weight, packs, pools

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        num = input_ids.shape[1]
        positions = torch.arange(num)[None] if position_ids is None else position_ids
        x, mask = self.tokens(input_ids) + self.places(positions), None
        if self.packs:
            document = (positions == 0).cumsum(1)
            is_earlier = torch.arange(num)[:, None] >= torch.arange(num)
            mask = ((document[:, :, None] == document[:, None]) & is_earlier)[:, None]
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return self.head(x.mean(1)) if self.pools else self.head(x)


PROVED = {
    "plain": {},
    "packed": {"packs": True},
    "grouped": {"kind": "grouped"},
    "rotary": {"kind": "rotary"},
    "others' positions": {"kind": "others' positions"},
    "by branches": {"kind": "by branches"},
    "rows of a table": {"kind": "rows of a table"},
    "kernel": {"kind": "kernel"},
    "pooled": {"pools": True},
    "manual": {"kind": "manual"},
    "mask in attention": {"kind": "mask in attention"},
    "kernel of rows": {"extra": "kernel of rows"},
    "hook of rows": {"extra": "hook of rows"},
    "norm of a gradient": {"extra": "norm of a gradient"},
}
REFUSED = {
    "log of the length": ("blocks.0.attention", {"kind": "log of the length"}),
    "token shift": ("blocks.0", {"extra": "token shift"}),
    "convolution": ("blocks.0", {"extra": "convolution"}),
    "batch norm": ("blocks.0.batch_norm", {"extra": "batch norm"}),
    "running mean": ("blocks.0", {"extra": "running mean"}),
    "best half": ("blocks.0", {"extra": "best half"}),
    "straight through": ("blocks.0.own", {"extra": "straight through"}),
}
"""Name -> the module that is named, and the arguments of :class:`Words`."""


def arguments_of(name: str) -> dict:
    return (
        {"kind": name}
        if name in ("no eps", "every third forward")
        else PROVED[name]
        if name in PROVED
        else REFUSED[name][1]
    )


def build(name: str, dtype: torch.dtype = torch.float64) -> Words:
    """A model whose norms and biases are not those of a constructor."""
    generator = torch.Generator().manual_seed(0)
    model = Words(**arguments_of(name)).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            scale = 0.3 if param.dim() > 1 else 0.1
            param.copy_(
                float(param.dim() < 2) * param + scale * torch.randn(param.shape, generator=generator, dtype=dtype)
            )
    return model


def batch(seed: int, num: int, name: str = "plain") -> dict[str, Tensor]:
    """Tokens, with as many labels as the seed says; documents of a packed sample."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2, num + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[0, : seed % num] = -100
    found = {"input_ids": ids[:, :-1].contiguous(), "labels": labels}
    if name == "packed":
        at = max(1, num // 3)
        found["position_ids"] = torch.cat([torch.arange(at), torch.arange(num - at)]).expand(2, -1).contiguous()
    return found


def windows(name: str, steps: int = 2, micro: int = 4) -> list[list[dict[str, Tensor]]]:
    """Micro-batches of other lengths, some of which no number of ranks divides."""
    lengths = [11, 24, 9, 17, 40, 13, 30, 8]
    return [
        [batch(10 * step + i, lengths[(step * micro + i) % len(lengths)], name) for i in range(micro)]
        for step in range(steps)
    ]


def loss_of(output: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The summed loss of the labels; of a pooled output, of each sample's first token."""
    if output.dim() == 2:
        return F.cross_entropy(output, given["input_ids"][:, 0], reduction="sum")
    return F.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), ignore_index=-100, reduction="sum")


def count(given: dict[str, Tensor]) -> Tensor:
    return (given["labels"] != -100).sum()
