"""A model whose temperature belongs to the loss, which uses it outside of the forward."""

import torch
from torch import Tensor, nn

from models.record import Model, numbered


class Tempered(nn.Module):
    """Its temperature belongs to the loss, which uses it outside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def build() -> Tempered:
    torch.manual_seed(4)
    return Tempered().double()


def batch(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(2 + index % 3, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 5, (len(x),), generator=generator)}


MODELS = (
    Model(
        name="tempered",
        build=build,
        batch=numbered(batch),
        tags=("own",),
        hard="a parameter that is used outside of the forward",
    ),
)
