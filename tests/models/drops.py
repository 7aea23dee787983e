"""The model of the tests of checkpoints: everything that a checkpoint has to hold."""

import torch
from torch import nn

from models.record import Model

VOCAB = 23


class DropBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.lin, self.drop = nn.Linear(dim, dim), nn.Dropout(0.2)
        self.gate = nn.Parameter(torch.tensor(0.7))  # 0-dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.drop(torch.tanh(self.lin(x)))


class Drops(nn.Module):
    """Uneven dims, tied embeddings, a buffer of another dtype, dropout."""

    def __init__(self, dim: int = 7):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(DropBlock(dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5, dtype=torch.int32))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = (
    Model(
        name="drops",
        build=Drops,
        tags=("own",),
        hard="dropout, a tie, odd shapes, a 0-dim parameter, an integer buffer",
    ),
)
