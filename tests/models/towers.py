"""Two encoders, used together or by themselves."""

import torch
from torch import Tensor, nn

from models.record import Model


class TwoTowers(nn.Module):
    """Encoders called by themselves, a block whose loss is read from an attribute, a parameter used outside forward."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.temperature, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.text(x)
        self.aux = y.pow(2).mean()
        return y


MODELS = (
    Model(
        name="two-towers",
        build=TwoTowers,
        tags=("own",),
        hard="parts called by themselves, a parameter used outside of forward",
    ),
)
