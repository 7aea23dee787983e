"""Replicated data parallelism: torch's composable DDP in place, with gradients summed instead of averaged.

``find_unused_parameters`` is always on: parameters used on some ranks only are then reduced right, ones no rank
used keep ``grad is None``, and buckets are never rebuilt after the first step, so a resumed run is bit-equal (on 4
ranks a rebuild moves sums by 1e-8).
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._compat import replicate, reset_replica, start_replica
from shardwise.anatomy import canonical_name, module_of_error
from shardwise.errors import UnsupportedError, UsageError
from shardwise.recipe import Recipe
from shardwise.world import World

__all__ = ["DDPEngine", "apply_ddp"]

_SETTLE_S = 5.0


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
        reduction = _Reduction(group)
        module.register_comm_hook(reduction, _sum_over_ranks)  # type: ignore[operator]
        start_replica(module)
        if world.axis("dp").size > 1:
            module.register_forward_pre_hook(reduction.refuse_summing_twice, prepend=True)
        return DDPEngine(module, reduction)
    return DDPEngine(module, None)


class _Reduction:
    """The group that gradients are summed over, and the sums that the last backward began."""

    def __init__(self, group: Any):
        self.group, self.works = group, []
        self.is_done = False  # a backward has summed gradients that may still be there
        self.was_begun = False  # since the window began

    def refuse_summing_twice(self, module: nn.Module, _args: Any) -> None:
        """Before a forward that a backward may follow: gradients that were summed over the ranks already would be summed
        again, n times as large (a window puts them aside; torch's averaging hides it, since a mean of equals is the
        same)."""
        if not self.is_done or not torch.is_grad_enabled():
            return
        grads = [param.grad for param in module.parameters() if param.grad is not None]
        if any(bool(grad.any()) for grad in grads):
            raise UsageError(
                "a second backward on top of gradients that were summed over the ranks already",
                why="each backward outside a window sums .grad over all ranks, so what is in it would count again",
                fix="run the micro-batches of a step inside `with sw.window(model, batches) as w:`, or call zero_grad() first",
            )
        self.is_done = False

    def settle(self) -> None:
        """Waits for sums of a backward that was left: they write into memory that the next backward uses. Bounded, since
        a peer that has ended will never come; then there is no next backward either."""
        end = time.monotonic() + _SETTLE_S
        while not all(work.is_completed() for work in self.works) and time.monotonic() < end:
            time.sleep(1e-3)
        self.works.clear()


def _sum_over_ranks(reduction: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    if bucket.index() == 0:
        reduction.works.clear()
    work = dist.all_reduce(bucket.buffer(), group=reduction.group, async_op=True)
    reduction.works.append(work)
    reduction.is_done = reduction.was_begun = True
    return work.get_future().then(lambda future: future.value()[0])


class DDPEngine:
    """Handles on a module replicated by :func:`apply_ddp`."""

    def __init__(self, module: nn.Module, reduction: _Reduction | None):
        self.root, self._reduction = module, reduction  # None: nothing is trained, so nothing is reduced

    def set_sync(self, sync: bool) -> None:
        if self._reduction is not None:
            self.root.set_requires_gradient_sync(sync)  # type: ignore[operator]

    def used(self) -> None:
        return None

    def entered(self) -> list[str]:
        """Nothing is gathered, so nothing has to be entered alike; but gradients are only summed by a backward from a
        call of the module itself, and only at the window's last micro-batch.

        Raises:
            UsageError: there are gradients, and nothing summed them.
        """
        if self._reduction is None or self._reduction.was_begun:
            return []
        alone = next((name for name, param in self.root.named_parameters() if param.grad is not None), None)
        if alone is not None:
            raise UsageError(
                "parts of the module were called, but not the module itself",
                why="its gradients are summed over the ranks by way of its own forward in the window's last micro-batch, "
                "so these were not: replicas drift",
                fix="call model(...) for each micro-batch; what else is to run belongs into its forward",
                name=canonical_name(self.root, alone),
            )
        return []

    def begin(self) -> None:
        if self._reduction is not None:
            self._reduction.was_begun = False

    def explain(self, error: BaseException) -> UnsupportedError | None:
        if "mark a variable ready only once" not in str(error):
            return None
        return UnsupportedError(
            "a backward inside the backward, as reentrant activation checkpointing runs one",
            why="DDP looks for unused parameters in the graph, where such a part is hidden, so it counted them as ready already",
            fix='call checkpoint(..., use_reentrant=False), or shard with Sharding(engine="fsdp2"), which is exact with both',
            name=module_of_error(self.root, error),
        )

    def abandon(self) -> None:
        self.set_sync(True)
        if self._reduction is not None:
            self._reduction.settle()
            reset_replica(self.root)
