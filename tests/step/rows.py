"""A task of a few rows: micro-batches with unequal numbers of samples, and a summed cross entropy of three classes."""

import torch
import torch.nn.functional as F

__all__ = ["by_x", "ce", "mine", "rows"]


def rows(window: int, sizes=(2, 3, 1, 4)):
    """The micro-batches of a window: ``x`` [n, 6] in float64, ``labels`` [n]."""
    generator = torch.Generator().manual_seed(window)
    return [
        {"x": torch.randn(n, 6, generator=generator).double(), "labels": torch.randint(3, (n,), generator=generator)}
        for n in sizes
    ]


def ce(output, batch):
    return F.cross_entropy(output, batch["labels"], reduction="sum")


def by_x(model, batch):
    return model(batch["x"])


def mine(world, micros):
    """Those of this data rank."""
    axis = world.axis("dp")
    return micros[axis.rank :: axis.size]
