"""Modules of the parity matrix that are written here, each with what makes it hard."""

import functools

import torch
from torch import Tensor, nn

from models.batches import VOCAB, class_loss, features, images, tokens
from models.record import Model
from shardwise.run.reference import ReferenceConfig, ReferenceModel


def reference() -> nn.Module:
    return ReferenceModel(
        ReferenceConfig(vocab=VOCAB, dim=12, num_layers=3, num_heads=2, num_kv_heads=1, ffn=20, max_seq=8)
    )


class ConvNet(nn.Module):
    """Convolutions with batch norm: running statistics, heterogeneous layers in one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(3):
            layers.append(nn.Sequential(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()))
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(6, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.stages(pixel_values).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM, then GRUs in a list: flat weights, hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.grus = nn.ModuleList([nn.GRU(14, 14, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        for gru in self.grus:
            y = y + gru(y)[0]
        return self.head(y[:, -1])


class OddBlock(nn.Module):
    def __init__(self, shared: nn.Linear, dim: int):
        super().__init__()
        self.shared = shared  # one Linear in every block: a tie with as many owners as blocks
        self.own = nn.Linear(dim, dim)
        self.gate = nn.Parameter(torch.tensor(0.5))  # 0-dim
        self.tiny = nn.Parameter(torch.ones(1, dim))  # dim 0 smaller than the ranks

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.own(self.shared(x))) * self.tiny


class Odd(nn.Module):
    """Ties with three owners, tied embeddings, frozen and 0-dim parameters, a ParameterList, parameters on the root,
    one that is never used, and one used in some micro-batches only."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        shared = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList([OddBlock(shared, dim) for _ in range(3)])
        self.free = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(3, dim)), nn.Parameter(torch.tensor(1.1))])
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.never = nn.Parameter(torch.randn(5))
        self.seldom = nn.Parameter(torch.randn(dim))
        self.register_buffer("shift", torch.linspace(0, 1, dim), persistent=False)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scales[0].sum(0) * self.scales[1] + self.shift
        if int(input_ids[0, 0]) % 2:  # differs by micro-batch, so by rank
            x = x + self.seldom
        for block in self.blocks:
            x = block(x)
        for layer in self.free:
            x = torch.tanh(layer(x))
        return self.head(self.frozen(x))


class BranchBlock(nn.Module):
    """A branch that depends on data, inside one unit."""

    def __init__(self, dim: int):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.a if float(x.detach().sum()) > 0 else self.b
        return x + torch.tanh(self.out(branch(x)))


class Branches(nn.Module):
    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList([BranchBlock(dim) for _ in range(3)])
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Each token goes to one expert of a list; an expert without tokens is not called."""

    def __init__(self, dim: int):
        super().__init__()
        self.router = nn.Linear(dim, 4)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                y[mask] = expert(x[mask]) * weights[mask, None]
        return x + y


class ExpertModel(nn.Module):
    """Experts outside any block list, so that a naive rule would make each a unit."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.first, self.second = Experts(dim), Experts(dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.second(self.first(self.embed(input_ids)))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class BranchFirst(nn.Module):
    """A branch that only some ranks take, before the first block: the block's input may need no gradient."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.maybe = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0, 0]) > 0:
            x = self.maybe(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x[:, -1])


class InPlace(nn.Module):
    """The parent works in place on what a unit returns, which for a Linear on 3-D input is a view."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            y = layer(x)
            y += x
            x = torch.tanh(y)
        logits = self.head(x)
        logits *= 0.5
        return logits


def halved_in_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    logits *= 0.5  # on the root's own output
    return logits


_own = functools.partial(Model, tags=("own", "matrix"))

MODELS = (
    _own(name="reference", build=reference, batch=tokens, hard="the transformer of `shardwise train`"),
    _own(name="conv", build=ConvNet, batch=images, loss=class_loss, hard="running statistics, layers that differ"),
    _own(name="recurrent", build=Recurrent, batch=features, loss=class_loss, hard="flat weights, hidden state"),
    _own(name="odd", build=Odd, batch=tokens, hard="ties, frozen, 0-dim, unused and seldom used parameters"),
    _own(name="branches", build=Branches, batch=tokens, hard="a branch that depends on data, inside one unit"),
    _own(name="experts", build=ExpertModel, batch=tokens, hard="experts that some ranks do not call"),
    _own(
        name="branch-first", build=BranchFirst, batch=features, loss=class_loss, hard="a branch before the first block"
    ),
    _own(
        name="inplace",
        build=InPlace,
        batch=tokens,
        forward=halved_in_place,
        hard="work in place on what a unit returns",
    ),
)
