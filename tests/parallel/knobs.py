"""Every knob of sharding and of how blocks run, with what it must leave equal (all numbers) and what it must change
(something counted).

A knob that is ignored passes any comparison of numbers, so each one names an observable that differs from the default's.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from parallel.recompute import CountOps, bytes_kept
from torch import Tensor, nn
from zoo import CASES

from shardwise._compat import unit_groups
from shardwise.config.options import DDP, Compile, Prefetch, Remat, Sharding
from shardwise.parallel import parallelize, runtime_of
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
    at_rest: int = 0  # bytes of parameters before the step
    whole_params: int = 0  # the most bytes of gathered parameters when a unit's backward begins
    between: int = 0  # the most bytes of parameters kept in part from forward to backward
    whole_grads: int = 0  # bytes of whole gradients that are kept from the first micro-batch to the second
    on_host: bool = False  # FSDP2 keeps shards in host memory
    kept: int = 0  # bytes that forward keeps for backward
    operators: int = 0  # that ran, forward and backward
    graphs: int = 0  # graphs that were compiled
    held: list[int] = field(default_factory=list)  # bytes of gathered parameters, after each event in order


def _count(name: str) -> Callable[[Seen], int]:
    return lambda seen: seen.collectives.get(name, 0)


gathers, scatters, sums = _count("_allgather_base"), _count("_reduce_scatter_base"), _count("allreduce")


def gathered_before(first: str, second: str) -> Callable[[Seen], bool]:
    """Whether unit ``first`` was gathered before ``second`` in the pass (forward or backward) that it belongs to."""

    def told(seen: Seen) -> bool:
        kind = second.split()[0]
        start = next(i for i, word in enumerate(seen.order) if word.split()[0] == kind)
        part = seen.order[start:]
        return f"gather {first}" in part[: part.index(second)]

    return told


@dataclass(frozen=True)
class Knob:
    """One setting, where it applies, and how it shows."""

    setting: str  # as a user writes it
    options: dict[str, Any]
    layouts: dict[int, str]
    observable: str
    seen: Callable[[Seen], Any]
    differs: Callable[[Any, Any], bool]  # (with the knob, by default) -> whether it is as it must be
    base: dict[str, Any] = field(default_factory=lambda: {"sharding": Sharding(**BLOCKS)})

    @property
    def is_slow(self) -> bool:
        return "compile" in self.options


def of_sharding(text: str, layouts: dict[int, str], observable: str, seen: Any, differs: Any) -> Knob:
    options = eval(f"dict({text})", {"Prefetch": Prefetch, "dict": dict})
    return Knob(text, {"sharding": Sharding(**BLOCKS, **options)}, layouts, observable, seen, differs)


def of_blocks(text: str, layouts: dict[int, str], observable: str, seen: Any, differs: Any) -> Knob:
    options = eval(f"dict({text})", {"Remat": Remat, "Compile": Compile, "dict": dict})
    base = {"sharding": Sharding(**BLOCKS)} if layouts is FSDP else {}
    return Knob(text, {**base, **options}, layouts, observable, seen, differs, base)


BYTES_OF_GATHERED, GATHERS, SCATTERS = "bytes gathered at most in backward", "gathers", "reduce-scatters"
KEPT, GRAPHS = "bytes kept from forward to backward", "graphs compiled"
KNOBS = [
    of_sharding("reshard_after_forward=False", FSDP, GATHERS, gathers, lambda a, b: a == b - 2 * 3),
    of_sharding("reshard_after_forward=False", FSDP, BYTES_OF_GATHERED, lambda s: s.whole_params, lambda a, b: a > b),
    of_sharding("reshard_after_forward=2", {4: FSDP[4]}, "bytes kept in part from forward to backward",
                lambda s: s.between, lambda a, b: a > b == 0),
    of_sharding("reshard_after_forward={'blocks.1': False}", FSDP, GATHERS, gathers, lambda a, b: a == b - 2),
    of_sharding("reshard_every=2", FSDP, GATHERS, gathers, lambda a, b: a == b - 2),
    of_sharding("sync_every_microbatch=True", FSDP, SCATTERS, scatters, lambda a, b: a == 2 * b),
    of_sharding("sync_every_microbatch=True", FSDP, "bytes of whole gradients between micro-batches",
                lambda s: s.whole_grads, lambda a, b: a == 0 < b),
    of_sharding("sync_every_microbatch=True", HSDP, "reduce-scatters, all-reduces",
                lambda s: (scatters(s), sums(s)), lambda a, b: a == (2 * b[0], b[1] + 4)),
    of_sharding("sync_every_microbatch='reduce_scatter'", HSDP, "reduce-scatters, all-reduces",
                lambda s: (scatters(s), sums(s)), lambda a, b: a == (2 * b[0], b[1])),
    of_sharding("prefetch=Prefetch(forward=1)", FSDP, "block 1 gathered before forward of block 0",
                gathered_before("blocks.1", "forward blocks.0"), lambda a, b: a and not b),
    of_sharding("prefetch='none'", FSDP, "block 1 gathered before backward of block 2",
                gathered_before("blocks.1", "backward blocks.2"), lambda a, b: b and not a),
    of_sharding("prefetch=Prefetch(backward=2)", FSDP, "block 0 gathered before backward of block 2",
                gathered_before("blocks.0", "backward blocks.2"), lambda a, b: a and not b),
    of_sharding("offload=True", FSDP, "shards kept in host memory", lambda s: s.on_host, lambda a, b: a and not b),
    of_sharding("offload=True", HSDP, "shards kept in host memory", lambda s: s.on_host, lambda a, b: a and not b),
    *[Knob(text, {"sharding": Sharding(**options)}, FSDP, GATHERS, gathers, differs) for text, options, differs in (
        ("units='none'", {"units": "none"}, lambda a, b: a == 2 < b),
        ("units=('blocks.1',)", {"units": ("blocks.1",)}, lambda a, b: a == 2 * (2 + 1) < b),
        ("min_unit_bytes=15_000", {"min_unit_bytes": 15_000}, lambda a, b: 2 < a < b),
        ("min_unit_params=2_000", {"min_unit_params": 2_000}, lambda a, b: 2 < a < b),
    )],
    Knob("DDP(bucket_cap_mb=0.001)", {"ddp": DDP(bucket_cap_mb=1e-3)}, REPLICAS, "all-reduces", sums,
         lambda a, b: a > b, {}),
    *[of_blocks(text, layouts, KEPT, lambda s: s.kept, lambda a, b: 0 < a < b)
      for layouts in (FSDP, REPLICAS)
      for text in ("remat='full'", "remat=Remat(every=2)", "remat=Remat(targets=('blocks.0',))")],
    *[of_blocks("remat='selective'", layouts, "operators run", lambda s: s.operators, lambda a, b: a > b)
      for layouts in (FSDP, REPLICAS)],
    *[of_blocks("compile=Compile(backend='aot_eager')", layouts, GRAPHS, lambda s: s.graphs, lambda a, b: a > b == 0)
      for layouts in (FSDP, REPLICAS)],
]  # fmt: skip


# ---- what a rank sees ------------------------------------------------------------------------------------------------


def see(layout: str, options: dict[str, Any], case: str = "reference") -> Seen:
    """One window of two micro-batches on this rank of ``layout``. All ranks call it."""
    chosen, before = CASES[case], _graphs_compiled()
    with init(layout, device="cpu", timeout_s=60) as world:
        torch.manual_seed(0)
        model = parallelize(chosen.build().double(), world, **options)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, optim, loss=chosen.loss, count=chosen.count, forward=chosen.forward)
        first, second = chosen.windows(2, 2 * world.size)
        step(share_of(first, world))  # torch makes its buckets and buffers in the first
        runtime = runtime_of(model)
        held = [runtime.local_tensors_of(name) for name in runtime.parameters]
        seen = Seen(at_rest=sum(tensor.numel() * tensor.element_size() for tensor in held))
        kept: list[int] = []
        with _watched(model, seen), CountCollectives() as counter, CountOps() as ops, bytes_kept(kept):
            step(share_of(second, world))
        seen.collectives, seen.operators = counter.counts, sum(ops.counts.values())
        seen.kept, seen.graphs = kept[0], _graphs_compiled() - before
        return seen


@contextlib.contextmanager
def _watched(model: nn.Module, seen: Seen) -> Iterator[None]:
    """Writes down, in order, what each unit does, and what is held whole meanwhile."""
    groups = {name: group for name, child in model.named_modules() for group in unit_groups(child)}
    with contextlib.ExitStack() as stack:
        for name, group in groups.items():
            _log_gathers(stack, name, group, groups, seen)
            _log_passes(stack, name, model.get_submodule(name), groups, seen)
        seen.on_host = bool(groups) and all(
            param.offload_to_cpu for group in groups.values() for param in group.fsdp_params
        )
        yield


def _graphs_compiled() -> int:
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.utils.counters["stats"]["unique_graphs"] if dynamo else 0


def _log_gathers(stack: contextlib.ExitStack, name: str, group: Any, groups: dict[str, Any], seen: Seen) -> None:
    unshard, wait, reshard = group.unshard, group.wait_for_unshard, group.reshard

    def held(function: Callable[[], None]) -> Callable[[], None]:
        def logged() -> None:
            function()
            seen.held.append(sum(map(_whole_parameters, groups.values())))

        return logged

    def logged(*args: Any) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            seen.order.append(f"gather {name}")
        unshard(*args)

    group.unshard, group.wait_for_unshard, group.reshard = logged, held(wait), held(reshard)
    for attr, method in (("unshard", unshard), ("wait_for_unshard", wait), ("reshard", reshard)):
        stack.callback(setattr, group, attr, method)


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
        seen.between = max(seen.between, sum(map(_kept_in_part, groups.values())))

    stack.callback(module.register_forward_pre_hook(forward).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _whole_parameters(group: Any) -> int:
    whole = [param._unsharded_param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    return sum(tensor.untyped_storage().size() for tensor in whole)


def _kept_in_part(group: Any) -> int:
    kept = [getattr(param, "_sharded_post_forward_param_data", None) for param in group.fsdp_params]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor is not None)


def _whole_gradients(group: Any) -> int:
    kept = [param.unsharded_accumulated_grad for param in group.fsdp_params]
    kept += [param._unsharded_param.grad for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    return sum(grad.numel() * grad.element_size() for grad in kept if grad is not None)
