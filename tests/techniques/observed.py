"""What a rank sees of a window of training: collectives, gathered bytes, order of units, graphs, dtypes."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import models
import torch
from techniques.remat.recompute import CountOps, bytes_kept
from torch import Tensor, nn

from shardwise._torch.fully_shard import unit_groups
from shardwise.parallel import parallelize, runtime_of
from shardwise.step.step import TrainStep
from shardwise.verify.sharded import CountCollectives, share_of
from shardwise.world import init


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
    units: int = 0  # of FSDP2
    scattered: int = 0  # bytes of gradients that are reduced and scattered
    attention: int = 0  # attention operators that ran forward, or forward again
    dtypes: tuple[str, str] = ("", "")  # of what the model's forward is given, and of what the model returns
    buffer: float = 0.0  # the mean of a batch norm's running mean
    asked: Any = None  # what torch was asked for, or what came of it


# ---- what a rank sees of what a window of the reference model does not show ---------------------------------------------------


class Halves(nn.Module):
    """Two blocks, the second with a graph break, and a batch norm that counts what each rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x


def see_sizes(layout: str, options: dict[str, Any]) -> Seen:
    """Graphs that are compiled for batches of four sizes."""
    with init(layout, device="cpu", timeout_s=60) as world:
        model, before = parallelize(Halves(), world, **options), _graphs_compiled()
        for size in (4, 5, 6, 7):
            model(torch.ones(size, 6)).sum().backward()
        return Seen(graphs=_graphs_compiled() - before)


def see_break(layout: str, options: dict[str, Any]) -> Seen:
    """Whether a block that is two graphs is an error."""
    with init(layout, device="cpu", timeout_s=60) as world:
        model = Halves()
        model.blocks[1] = Broken(6, 6)
        model = parallelize(model, world, **options)
        try:
            model(torch.ones(4, 6))
        except Exception as error:
            return Seen(asked="graph_break" in str(error) or "fullgraph" in str(error))
        return Seen(asked=False)


def see_asked(layout: str, options: dict[str, Any]) -> Seen:
    """The mode that torch.compile is given, and how many blocks it was put on."""
    given: list[dict[str, Any]] = []
    fake = mock.patch.object(torch, "compile", lambda function, **words: given.append(words) or function)
    with init(layout, device="cpu", timeout_s=60) as world, fake:
        recipe = runtime_of(parallelize(Halves(), world, **options)).recipe
    blocks = sum(edit.technique == "compile" for edit in recipe.edits)
    return Seen(asked=given[0]["mode"] or "none", units=blocks)


def see_dtypes(layout: str, options: dict[str, Any]) -> Seen:
    """Of what forward is given, and of what the model returns."""
    seen: list[Tensor] = []
    with init(layout, device="cpu", timeout_s=60) as world:
        model = Halves()
        model.forward = lambda x: seen.append(x) or x + model.norm.weight.sum()  # type: ignore[method-assign]
        out = parallelize(model, world, **options)(torch.ones(4, 6))
    return Seen(dtypes=(_name(seen[0]), _name(out)))


def see_buffers(layout: str, options: dict[str, Any]) -> Seen:
    """A running mean after a window in which each rank saw another mean."""
    with init(layout, device="cpu", timeout_s=60) as world:
        torch.manual_seed(0)
        model = parallelize(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double(), world, **options)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=_squares, count=len_of)
        step([{"x": torch.arange(24, dtype=torch.float64).reshape(4, 6) * (1 + world.rank) ** 2}])
        return Seen(buffer=float(model.get_buffer("1.running_mean").mean()))


def _squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.square().sum()


def len_of(batch: dict[str, Tensor]) -> int:
    return len(batch["x"])


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- of a window of the reference model ------------------------------------------------------------------------------------------------


def see(layout: str, options: dict[str, Any], dtype: torch.dtype = torch.float64, case: str = "reference") -> Seen:
    """One window of two micro-batches on this rank of ``layout``. All ranks call it."""
    chosen, before = models.get(case), _graphs_compiled()
    with init(layout, device="cpu", timeout_s=60) as world:
        torch.manual_seed(0)
        model = parallelize(chosen.build().to(dtype), world, **options)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, optim, loss=chosen.loss, count=chosen.count, forward=chosen.forward)
        first, second = chosen.windows(2, 2 * world.size)
        step(share_of(first, world))  # torch makes its buckets and buffers in the first
        runtime = runtime_of(model)
        held = [runtime.local_tensor_of(name) for name in runtime.parameters]
        seen = Seen(at_rest=sum(tensor.numel() * tensor.element_size() for tensor in held))
        kept: list[int] = []
        with _watched(model, seen), _CountBytes() as counter, CountOps() as ops, bytes_kept(kept):
            step(share_of(second, world))
        seen.collectives, seen.operators = counter.counts, sum(ops.counts.values())
        seen.attention = sum(count for name, count in ops.counts.items() if _is_attention(name))
        seen.scattered, seen.units = counter.scattered, sum(1 for child in model.modules() for _ in unit_groups(child))
        seen.kept, seen.graphs = kept[0], _graphs_compiled() - before
        return seen


class _CountBytes(CountCollectives):
    """Also how many bytes are reduced and scattered."""

    scattered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in str(func):
            self.scattered += args[1].nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name and "backward" not in name


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
