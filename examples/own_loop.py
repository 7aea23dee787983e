"""Keep your own training loop: forward, backward, clip and step stay yours, the window makes the sums right.

python examples/own_loop.py
torchrun --standalone --nproc-per-node 2 examples/own_loop.py
"""

import torch
from torch import nn

import shardwise as sw


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def make_data(num: int = 512) -> list[dict[str, torch.Tensor]]:
    """A function to learn: the product of the first two inputs."""
    x = torch.randn(num, 16, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "y": row[0] * row[1]} for row in x]


def main(num_epochs: int = 3) -> float:
    with sw.init("dp_shard=-1") as world:
        model = sw.parallelize(build, world)
        optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = sw.Loader(make_data(), world, global_batch=64, micro_batch=16, prepare=None)
        for epoch in range(num_epochs):
            total = torch.zeros((), dtype=torch.float64)
            for batches in loader:
                # No labels here, so the window is told what is counted: samples.
                with sw.window(model, batches, count=lambda batch: batch["x"].shape[0]) as window:
                    for batch in window:
                        # A sum over the samples, divided by their number on all ranks: never a mean of means.
                        error = (model(batch["x"]).squeeze(-1) - batch["y"]).square().sum()
                        (error / window.num_tokens).backward()
                        total += 0.0 if batch.padding else error.item()
                sw.clip_grad_norm_(model, 1.0)
                optim.step()
                optim.zero_grad()
            mean = float(world.axis("dp").reduce(total)) / 512
            if world.is_main:
                print(f"epoch {epoch}: mean squared error {mean:.5f}", flush=True)
        return mean


if __name__ == "__main__":
    main()
