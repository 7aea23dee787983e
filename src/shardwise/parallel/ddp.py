"""Replicated data parallelism: torch's composable DDP in place, with gradients summed instead of averaged.

``find_unused_parameters`` is always on: parameters used on some ranks only are then reduced right, ones no rank
used keep ``grad is None``, and buckets are never rebuilt after the first step, so a resumed run is bit-equal (on 4
ranks a rebuild moves sums by 1e-8).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._compat import replicate, start_replica
from shardwise.recipe import Recipe
from shardwise.world import World

__all__ = ["DDPEngine", "apply_ddp"]


def apply_ddp(module: nn.Module, recipe: Recipe, world: World) -> "DDPEngine":
    """Makes ``module`` a replica, in place. Its tensors must have their values already."""
    if any(param.trainable for param in recipe.params.values()):
        group = world.axis("dp").group or dist.group.WORLD
        replicate(
            module,
            process_group=group,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # buffers follow the recipe's policy, once per window
            init_sync=False,  # values were scattered from rank 0 already
        )
        module.register_comm_hook(group, _sum_over_ranks)  # type: ignore[operator]
        start_replica(module)
    return DDPEngine(module, trains=any(param.trainable for param in recipe.params.values()))


def _sum_over_ranks(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class DDPEngine:
    """Handles on a module replicated by :func:`apply_ddp`."""

    def __init__(self, module: nn.Module, *, trains: bool):
        self.root, self._trains = module, trains

    def set_sync(self, sync: bool) -> None:
        if self._trains:
            self.root.set_requires_gradient_sync(sync)  # type: ignore[operator]

    def used(self) -> None:
        return None

    def entered(self) -> list[str]:
        return []

    def begin(self) -> None:
        pass

    def abandon(self) -> None:
        self.set_sync(True)
