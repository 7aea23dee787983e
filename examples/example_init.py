"""Where a model's values come from: the same ones under every layout, without any rank building the whole model.

python examples/example_init.py
torchrun --standalone --nproc-per-node 2 examples/example_init.py        # the same numbers
"""

import warnings

import numpy as np
import torch
from torch import nn

import shardwise as sw


class Model(nn.Module):
    """Initialised the way models are: by a function applied to every module, a table, and a parameter of its own."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(dim) * 0.01 + 1)
        self.register_buffer("table", 1.0 / 10000 ** (torch.arange(0, dim) / dim), persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.embed(input) + self.table
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x * self.scale


class WithNumpy(Model):
    """numpy's numbers cannot be replayed: rank 0 builds this one, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.from_numpy(np.random.randn(32)).float())


def show(world: sw.World, build: type[nn.Module], **options: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = sw.parallelize(build, world, **options)
    weights = sw.full_state_dict(model)  # whole tensors on rank 0
    if world.is_main:
        note = next(note.why for note in sw.recipe_of(model).notes if note.name == "init")
        print(f"{build.__name__}: {note}")
        print(f"  warned: {bool(said)}")
        if note.startswith("seeded"):
            print(f"  first weights {', '.join(f'{value:.6f}' for value in weights['embed.weight'][0, :3])}")
        print(f"  spread of the scale {weights['scale'].std():.2f}, of a block {weights['blocks.1.weight'].std():.2f}")


def main() -> None:
    with sw.init("dp_shard=-1", seed=7) as world:
        show(world, Model)
        show(world, Model, init="rank0")
        show(world, WithNumpy)


if __name__ == "__main__":
    main()
