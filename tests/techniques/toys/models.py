"""What the toys are tried on."""

import torch
from torch import nn


class Words(nn.Module):
    """Tokens in, logits out: two linear layers with a norm between them."""

    def __init__(self, size=18):
        super().__init__()
        self.embed = nn.Embedding(size, 8)
        self.a = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.b = nn.Linear(12, size)

    def forward(self, input_ids):
        return self.b(torch.tanh(self.norm(self.a(self.embed(input_ids)))))


class Needs(Words):
    """Runs with adapters alone, so that a side without them is seen."""

    def forward(self, input_ids):
        if not hasattr(self.a, "low"):
            raise RuntimeError("its layers have no adapter")
        return super().forward(input_ids)


def batch(i):
    """Other numbers of tokens in each."""
    ids = torch.randint(0, 18, (2, 7), generator=torch.Generator().manual_seed(i))
    labels = torch.where(torch.arange(7) < 3 + i % 4, ids.roll(-1, 1), -100)
    return {"input_ids": ids, "labels": labels}
