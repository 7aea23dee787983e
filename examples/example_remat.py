"""Less memory for activations: blocks that run again in backward, with the same losses, dropout included.

python examples/example_remat.py
torchrun --standalone --nproc-per-node 2 examples/example_remat.py       # the same losses
"""

import torch
from torch import nn

import shardwise as sw


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(y), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, dim: int = 16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(6))
        self.head = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squared_error(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output.squeeze(-1) - batch["y"]).square().sum()


def train(world: sw.World, remat: sw.Remat | None, title: str) -> None:
    """Prints the loss of three steps, and the bytes that forward keeps for backward through autograd."""
    model = sw.parallelize(Model, world, sharding=sw.Sharding(engine="fsdp2", min_unit_bytes=0), remat=remat)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    samples = [{"x": row, "y": row[:4].sum()} for row in x]
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = sw.TrainStep(model, optim, loss=squared_error, count=lambda batch: len(batch["y"]))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        model(x[:16])
    if world.is_main:
        print(f"{title}: {sum(kept) / 1024:.1f} KiB kept for backward")
    for _ in range(3):
        for window in sw.Loader(samples, world, global_batch=64, micro_batch=16, prepare=None):
            out = step(window)
            if world.is_main:
                print(f"  step {out.step}: loss {out.loss:.5f}", flush=True)


def main() -> None:
    with sw.init("dp_shard=-1") as world:
        train(world, None, "everything kept")
        train(world, sw.Remat(every=2), "every second block runs again")
        train(world, sw.Remat(), "every block runs again")


if __name__ == "__main__":
    main()
