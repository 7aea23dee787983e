"""Training in half precision."""

import models
import torch

import shardwise as sw


def train(layout: str, precision: str, fused: bool) -> tuple[list[float], list[bool]]:
    """Losses of five steps, and which were skipped."""
    model = models.get("qwen3")
    with sw.init(layout, device="cpu", seed=2) as world:
        module = sw.parallelize(model.build, world, precision=precision)
        optim = torch.optim.AdamW(module.parameters(), lr=1e-2)
        step = sw.TrainStep(module, optim, max_grad_norm=1.0, fused=fused)
        axis = world.axis("dp")
        found = [step(window[axis.rank :: axis.size]) for window in model.windows(5, 4)]
        return [out.loss for out in found], [out.skipped for out in found]
