"""The small model of the tests of steps, its micro-batches and its loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.record import Model, numbered


class Tied(nn.Module):
    """Three blocks and what is awkward: a tie, a 0-dim parameter, rows that two or four ranks cannot share evenly."""

    def __init__(self, dim: int = 5, vocab: int = 11):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.gate
        return self.head(x)


def build() -> Tied:
    """The same values in every process, float64."""
    torch.manual_seed(3)
    return Tied().double()


def batch(index: int, *, valid: int | None = None, vocab: int = 11) -> dict[str, Tensor]:
    """Micro-batch number ``index``: unequal numbers of valid tokens, or ``valid`` of them."""
    generator = torch.Generator().manual_seed(100 + index)
    ids = torch.randint(0, vocab, (2, 5), generator=generator)
    labels = ids[:, 1:].clone()
    labels.view(-1)[(8 - 2 * (index % 3)) if valid is None else valid :] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def sum_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


MODELS = (
    Model(
        name="tied",
        build=build,
        batch=numbered(batch),
        loss=sum_loss,
        tags=("own",),
        hard="a tie, a 0-dim parameter, rows that two or four ranks cannot share evenly",
    ),
)
