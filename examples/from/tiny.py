"""What the scripts of this folder train: a tiny language model, on samples of equal length."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab: int = 61, dim: int = 16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def samples(num: int = 48, length: int = 12, vocab: int = 61) -> list[dict[str, torch.Tensor]]:
    """``labels[t]`` is the token after ``input_ids[t]``."""
    rows = torch.randint(vocab, (num, length + 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
