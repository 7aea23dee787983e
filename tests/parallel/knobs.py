"""Every knob of sharding, with what it must leave equal (all numbers) and what it must change (something counted).

A knob that is ignored passes any comparison of numbers, so each one names an observable that differs from the default's.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from zoo import CASES

from shardwise._compat import unit_groups
from shardwise.config.options import DDP, Prefetch, Sharding
from shardwise.parallel import parallelize
from shardwise.train.step import TrainStep
from shardwise.verify.sharded import CountCollectives, share_of
from shardwise.world import init

BLOCKS = {"min_unit_bytes": 0}
FSDP = {2: "dp_shard=2", 4: "dp_shard=4"}
HSDP = {4: "dp_replicate=2,dp_shard=2"}
REPLICAS = {2: "dp_replicate=2", 4: "dp_replicate=4"}


@dataclass
class Seen:
    """What one rank saw in a window of two micro-batches: the observables."""

    collectives: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # "gather blocks.0", "forward blocks.0", ...
    whole_params: int = 0  # the most bytes of gathered parameters when a unit's backward begins
    whole_grads: int = 0  # bytes of whole gradients that are kept from the first micro-batch to the second
    on_host: bool = False  # FSDP2 keeps shards in host memory


@dataclass(frozen=True)
class Knob:
    """One setting, where it applies, and how it shows."""

    name: str
    options: dict[str, Any]
    layouts: dict[int, str]
    differs: Callable[[Seen, Seen], bool]  # (with the knob, by default) -> whether it shows
    base: dict[str, Any] = field(default_factory=lambda: {"sharding": Sharding(**BLOCKS)})


def sharded(**options: Any) -> dict[str, Any]:
    return {"sharding": Sharding(**BLOCKS, **options)}


def _count(name: str) -> Callable[[Seen], int]:
    return lambda seen: seen.collectives.get(name, 0)


gathers, scatters, sums = _count("_allgather_base"), _count("_reduce_scatter_base"), _count("allreduce")


KNOBS = [
    Knob("reshard_false", sharded(reshard_after_forward=False), FSDP, lambda a, b: gathers(a) == gathers(b) - 2 * 3),
    Knob("reshard_false_holds_more", sharded(reshard_after_forward=False), FSDP, lambda a, b: a.whole_params > b.whole_params),
    Knob("reshard_int", sharded(reshard_after_forward=2), {4: FSDP[4]}, lambda a, b: gathers(a) == gathers(b)),
    Knob("reshard_of_one_unit", sharded(reshard_after_forward={"blocks.1": False}), FSDP,
         lambda a, b: gathers(a) == gathers(b) - 2),
    Knob("reshard_every", sharded(reshard_every=2), FSDP, lambda a, b: gathers(a) == gathers(b) - 2),
    Knob("sync_each", sharded(sync_every_microbatch=True), FSDP,
         lambda a, b: scatters(a) == 2 * scatters(b) and b.whole_grads > a.whole_grads == 0),
    Knob("sync_each_hybrid", sharded(sync_every_microbatch=True), HSDP,
         lambda a, b: scatters(a) == 2 * scatters(b) and sums(a) == sums(b) + 4),
    Knob("reduce_scatter_each", sharded(sync_every_microbatch="reduce_scatter"), HSDP,
         lambda a, b: scatters(a) == 2 * scatters(b) and sums(a) == sums(b)),
    Knob("prefetch_forward", sharded(prefetch=Prefetch(forward=1)), FSDP,
         lambda a, b: before(a, "gather blocks.1", "forward blocks.0") and not before(b, "gather blocks.1", "forward blocks.0")),
    Knob("prefetch_none", sharded(prefetch="none"), FSDP,
         lambda a, b: before(b, "gather blocks.1", "backward blocks.2") and not before(a, "gather blocks.1", "backward blocks.2")),
    Knob("prefetch_two_back", sharded(prefetch=Prefetch(backward=2)), FSDP,
         lambda a, b: before(a, "gather blocks.0", "backward blocks.2") and not before(b, "gather blocks.0", "backward blocks.2")),
    Knob("offload", sharded(offload=True), FSDP, lambda a, b: a.on_host and not b.on_host),
    Knob("offload_hybrid", sharded(offload=True), HSDP, lambda a, b: a.on_host and not b.on_host),
    Knob("buckets", {"ddp": DDP(bucket_cap_mb=1e-3)}, REPLICAS, lambda a, b: sums(a) > sums(b), {}),
]  # fmt: skip


def before(seen: Seen, first: str, second: str) -> bool:
    """Whether ``first`` came before ``second`` in the pass (forward or backward) that ``second`` belongs to."""
    kind = second.split()[0]
    start = next(i for i, word in enumerate(seen.order) if word.split()[0] == kind)
    part = seen.order[start:]
    return first in part[: part.index(second)]


# ---- what a rank sees ------------------------------------------------------------------------------------------------


def see(layout: str, options: dict[str, Any], case: str = "reference") -> Seen:
    """One window of two micro-batches on this rank of ``layout``. All ranks call it."""
    chosen = CASES[case]
    with init(layout, device="cpu", timeout_s=60) as world:
        torch.manual_seed(0)
        model = parallelize(chosen.build().double(), world, **options)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, optim, loss=chosen.loss, count=chosen.count, forward=chosen.forward)
        first, second = chosen.windows(2, 2 * world.size)
        step(share_of(first, world))  # torch makes its buckets and buffers in the first
        seen = Seen()
        with _watched(model, seen), CountCollectives() as counter:
            step(share_of(second, world))
        seen.collectives = counter.counts
        return seen


@contextlib.contextmanager
def _watched(model: nn.Module, seen: Seen) -> Iterator[None]:
    """Writes down, in order, what each unit does, and what is held whole meanwhile."""
    groups = {name: group for name, child in model.named_modules() for group in unit_groups(child)}
    with contextlib.ExitStack() as stack:
        for name, group in groups.items():
            _log_gathers(stack, name, group, seen)
            _log_passes(stack, name, model.get_submodule(name), groups, seen)
        seen.on_host = bool(groups) and all(
            param.offload_to_cpu for group in groups.values() for param in group.fsdp_params
        )
        yield


def _log_gathers(stack: contextlib.ExitStack, name: str, group: Any, seen: Seen) -> None:
    unshard = group.unshard

    def logged(*args: Any) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            seen.order.append(f"gather {name}")
        unshard(*args)

    group.unshard = logged
    stack.callback(lambda: setattr(group, "unshard", unshard))


def _log_passes(stack: contextlib.ExitStack, name: str, module: nn.Module, groups: dict[str, Any], seen: Seen) -> None:
    """Hooks that run after FSDP2's own, and so after what it gathers ahead."""

    def forward(_module: nn.Module, _args: Any) -> None:
        seen.order.append(f"forward {name}")
        if name == "":
            seen.whole_grads = max(seen.whole_grads, sum(map(_whole_gradients, groups.values())))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        output.register_hook(backward)

    def backward(_grad: Tensor) -> None:
        seen.order.append(f"backward {name}")
        seen.whole_params = max(seen.whole_params, sum(map(_whole_parameters, groups.values())))

    stack.callback(module.register_forward_pre_hook(forward).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _whole_parameters(group: Any) -> int:
    whole = [param._unsharded_param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    return sum(tensor.untyped_storage().size() for tensor in whole)


def _whole_gradients(group: Any) -> int:
    kept = [param.unsharded_accumulated_grad for param in group.fsdp_params]
    kept += [param._unsharded_param.grad for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    return sum(grad.numel() * grad.element_size() for grad in kept if grad is not None)
