"""Which modules are gathered together: found in the structure of a model, or named by you.

python examples/example_units.py
torchrun --standalone --nproc-per-node 2 examples/example_units.py       # the same units, the same losses
"""

import torch
from torch import nn

import shardwise as sw


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A tower of blocks that every sample goes through, and experts of which each sample uses one."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(4))
        self.experts = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        chosen = x[:, 0] > 0
        y = torch.zeros_like(x)
        for mask, expert in zip((chosen, ~chosen), self.experts, strict=True):
            if mask.any():  # a rank without such samples skips this expert, and takes its turn in passing
                y[mask] = expert(x[mask])
        return self.head(x + y)


def squared_error(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output.squeeze(-1) - batch["y"]).square().sum()


def train(world: sw.World, sharding: sw.Sharding, title: str) -> None:
    """Prints the units, each with its reason, and the loss of three steps."""
    model = sw.parallelize(Model, world, sharding=sharding)
    if world.is_main:
        print(title)
        for unit in sw.recipe_of(model).units:
            print(f"  unit {', '.join(unit.modules) or '(root)'}")
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    samples = [{"x": row, "y": row[:4].sum()} for row in x]
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = sw.TrainStep(model, optim, loss=squared_error, count=lambda batch: len(batch["y"]))
    for _ in range(3):
        for window in sw.Loader(samples, world, global_batch=64, micro_batch=16, prepare=None):
            out = step(window)
            if world.is_main:
                print(f"  step {out.step}: loss {out.loss:.5f}", flush=True)


def main() -> None:
    with sw.init("dp_shard=-1") as world:
        train(world, sw.Sharding(engine="fsdp2", min_unit_bytes=0), "every block a unit")
        train(world, sw.Sharding(engine="fsdp2", min_unit_bytes=16 << 10), "neighbours merged until 16 KiB")
        train(world, sw.Sharding(engine="fsdp2", units=("blocks.[01]", "head")), "named by pattern")


if __name__ == "__main__":
    main()
