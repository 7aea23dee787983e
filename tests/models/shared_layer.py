"""Blocks that share a layer, tied ends, parameters that are used sometimes or never."""

import torch
from torch import Tensor, nn

from models.record import Model


class Block(nn.Module):
    def __init__(self, dim: int = 4):
        super().__init__()
        self.inner, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Tied ends, a list of blocks, parameters that are used sometimes or never."""

    def __init__(self, dim: int = 4):
        super().__init__()
        self.embed = nn.Embedding(7, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(3)])
        self.blocks[2].inner = self.blocks[0].inner  # shared by two blocks
        self.head = nn.Linear(dim, 7, bias=False)
        self.head.weight = self.embed.weight
        self.sometimes, self.never = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if int(ids[0]) == 0:
            x = x * self.sometimes
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> nn.Module:
    torch.manual_seed(3)
    return Net().double()


MODELS = (
    Model(
        name="shared-layer",
        build=build,
        tags=("own",),
        hard="a layer shared by two blocks, tied ends, unused parameters",
    ),
)
