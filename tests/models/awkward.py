"""One module with every shape, stride and dtype that is hard to scatter."""

import torch
from torch import Tensor, nn

from models.record import Model


class Awkward(nn.Module):
    """Everything that is hard to scatter."""

    def __init__(self):
        super().__init__()
        self.uneven = nn.Parameter(torch.randn(7, 3))
        self.narrow = nn.Parameter(torch.randn(1, 5))
        self.three = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.hollow = nn.Parameter(torch.randn(4, 0))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.frozen = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16), requires_grad=False)
        self.codes = nn.Parameter(torch.randint(0, 9, (5, 2)), requires_grad=False)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 5)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.randint(0, 100, ()))
        self.register_buffer("flags", torch.rand(3, 3) > 0.5)
        self.register_buffer("small", torch.randint(0, 255, (7,), dtype=torch.uint8))
        self.register_buffer("ids", torch.randint(0, 9, (4,)).expand(3, -1), persistent=False)
        self.register_buffer("strided", torch.randn(4, 6)[:, ::2])
        self.register_buffer("unset", torch.full((2,), float("nan")))
        self.register_buffer("wide", torch.randn(2, dtype=torch.float64))
        self.register_buffer("void", torch.randn(0))
        self.table = torch.randn(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


MODELS = (Model(name="Awkward", build=Awkward, tags=("constructor",), hard="everything that is hard to scatter"),)
