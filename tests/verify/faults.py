"""Deliberate faults, made by patching functions of the library on every rank before the very same comparison runs."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import shardwise.parallel.buffers
import shardwise.step.clip
import shardwise.step.exchange
import shardwise.step.window
import shardwise.techniques.data.fsdp2
import shardwise.techniques.data.replicas
from shardwise._torch.fsdp2 import Unit
from shardwise._torch.fully_shard import unit_groups
from shardwise.data.batch import MicroBatch
from shardwise.step.norm import norm_power_sum
from shardwise.verify import run_sharded


def averaged() -> Any:
    """FSDP2 left at its default: gradients averaged over the ranks."""
    return _summed_by(None)


def slightly_divided() -> Any:
    """Gradients five parts in 100,000 too small."""
    return _summed_by(1.00005)


def _summed_by(factor: float | None) -> Any:
    """Units whose gradients are divided by ``factor``; None: by the number of ranks."""

    def summed(module: Any) -> None:
        for group in unit_groups(module):
            group.gradient_divide_factor, group.force_sum_reduction_for_comms = factor, True

    return mock.patch.object(shardwise.techniques.data.fsdp2, "sum_gradients", summed)


def averaged_ddp() -> Any:
    """DDP as torch has it: gradients averaged over the ranks."""
    engine = shardwise.techniques.data.replicas.DDPEngine
    complete = engine.complete

    def average(self: Any, *args: Any, **keywords: Any) -> None:
        complete(self, *args, **keywords)
        for flat in self.flat_gradients():
            flat /= self.world.axis("dp").size

    return mock.patch.object(engine, "complete", average)


def all_reduce_dropped() -> Any:
    """The replicas of HSDP do not add up their gradients."""
    original = Unit.sum_gradients

    def without(self: Any, sums: bool, over_replicas: bool) -> None:
        original(self, sums, False)

    return mock.patch.object(Unit, "sum_gradients", without)


def local_norm() -> Any:
    """Each rank clips by the norm of its own shards."""
    scale = shardwise.step.clip.scale_gradients

    def by_own(runtime: Any, norm: float, max_norm: float) -> None:
        own = float(norm_power_sum(runtime.gradients().values(), 2.0).sqrt())
        scale(runtime, own, max_norm)

    return mock.patch.object(shardwise.step.clip, "scale_gradients", by_own)


def mean_of_means() -> Any:
    """Each rank divides by its own tokens, and the ranks are averaged."""
    count = shardwise.step.window.agree_on_count

    def own(runtime: Any, batches: Any, counter: Any, **kwargs: Any) -> Any:
        counted = count(runtime, batches, counter, **kwargs)
        return counted._replace(tokens=float(sum(counter(batch) for batch in batches)) * runtime.world.size)

    return mock.patch.object(shardwise.step.window, "agree_on_count", own)


def stale_buffer() -> Any:
    """Running statistics are left as each rank has them."""
    return mock.patch.object(shardwise.parallel.buffers, "make_equal", lambda *args: None)


def whole_parameters_not_summed() -> Any:
    """0-dim parameters keep the gradient of their own rank."""
    return mock.patch.object(shardwise.step.exchange, "_of_pair", lambda _, param: param.grad)


def unused_as_zero() -> Any:
    """A parameter that no rank used gets zeros instead of None."""

    def used(self: Any) -> Tensor:
        return torch.ones_like(self._used)

    from shardwise.techniques.data.fsdp2 import FSDP2Engine

    return mock.patch.object(FSDP2Engine, "used", used)


FAULTS: dict[str, Callable[[], Any]] = {
    fault.__name__: fault
    for fault in (
        averaged,
        slightly_divided,
        averaged_ddp,
        all_reduce_dropped,
        local_norm,
        mean_of_means,
        stale_buffer,
        whole_parameters_not_summed,
        unused_as_zero,
    )
}


def clipped_to_half() -> Any:
    """Gradients are clipped to half of the norm that was asked for."""
    scale = shardwise.step.clip.scale_gradients

    def half(runtime: Any, norm: float, max_norm: float) -> None:
        scale(runtime, norm, max_norm / 2)

    return mock.patch.object(shardwise.step.clip, "scale_gradients", half)


def paddings_taken_for_data() -> Any:
    """The copies that fill up a window are trained on."""
    micro_batch = shardwise.step.window.Window._micro_batch

    def data(self: Any, i: int) -> MicroBatch:
        batch = micro_batch(self, i)
        return MicroBatch(batch, index=batch.index)

    return mock.patch.object(shardwise.step.window.Window, "_micro_batch", data)


def paddings_have_gradients() -> Any:
    """What gradients of paddings have beside those of the loss, which is divided by infinity, counts."""
    accumulation = shardwise.step.window.Accumulation
    set_padding = accumulation.set_padding

    def never(self: Any, padding: bool) -> None:
        set_padding(self, False)

    return mock.patch.object(accumulation, "set_padding", never)


def same_masks() -> Any:
    """Dropout has the same masks in every micro-batch of every step."""
    derive = shardwise.step.window.derive_seed

    def one(seed: int, *place: Any) -> int:
        return derive(seed, place[0], 0, 0)

    return mock.patch.object(shardwise.step.window, "derive_seed", one)


FAULTS_OF_DEFAULTS = {
    fault.__name__: fault for fault in (clipped_to_half, paddings_taken_for_data, paddings_have_gradients, same_masks)
}
"""What a comparison finds whose windows and options are those of the command."""


def run_with_fault(fault: str, *args: Any) -> Any:
    """What a rank runs instead of ``run_sharded``."""
    with FAULTS[fault]():
        return run_sharded(*args)


def run_with_fault_of_defaults(fault: str, function: Any, *args: Any) -> Any:
    """What a rank of the command runs instead of ``function``."""
    with FAULTS_OF_DEFAULTS[fault]():
        return function(*args)
