"""Parameters of no sharded model, such as a loss's own or those of a plain second network, that a window's backwards come to: nothing sums
their gradients over the ranks. An optimizer that steps them so lets the ranks drift apart: in windows 0, 1, 2, 4, 8, ... they are compared."""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import Backward, path_of
from shardwise.errors import UsageError
from shardwise.model.tensors import checksum
from shardwise.parallel.runtime import Runtime, runtimes_in_use
from shardwise.world.agreement import Entry, digest_of_text


class _Stepped(NamedTuple):
    """An optimizer of such parameters, and a digest of their values before its first step: ranks that had others may mean them."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    first: int


class OutsideParameters:
    """What a model's windows have come to besides.

    Attributes:
        found: id -> leaf of a graph that is no sharded model's.
        stepped: optimizers without a parameter of a sharded model, in the order of their first steps.
        values: of those that hold something found, by number: the digest of its first values, and of those now.
    """

    def __init__(self) -> None:
        self.found: dict[int, weakref.ref[Tensor]] = {}
        self.stepped: list[_Stepped] = []
        self.values: dict[int, tuple[int, int]] = {}


def _is_due(runtime: Runtime) -> bool:
    """Whether the window that is open looks for such parameters, and compares them; equal on every rank."""
    return runtime.world.axis("loss").size > 1 and not runtime.num_windows & (runtime.num_windows - 1)


def look_for_outside(runtime: Runtime, backward: Backward) -> None:
    """Notes the leaves that a backward of an open window comes to and no sharded model has. Parameters among them have, after a padding, which
    counts nowhere, the gradients from before it."""
    is_padding = runtime.accumulation is not None and runtime.accumulation.is_padding
    if not is_padding and not _is_due(runtime):
        return
    given = {id(x) for x in backward.inputs}
    own = {
        id(each)
        for other in runtimes_in_use()
        for each in (*other.parameters.values(), *(copy for copy, _ in other.engine.gathered()))
    }
    for leaf in path_of(backward.outputs, past_marks=True).leaves:
        if id(leaf) in own or (given and id(leaf) not in given):
            continue
        runtime.memory(OutsideParameters).found[id(leaf)] = weakref.ref(leaf)
        if is_padding and isinstance(leaf, nn.Parameter):
            backward.until_end.callback(setattr, leaf, "grad", None if leaf.grad is None else leaf.grad.clone())


def note_stepped(optimizer: torch.optim.Optimizer, held: Mapping[int, Tensor]) -> None:
    """Notes an optimizer that holds no parameter of a sharded model, before its first step. What torch's own FSDP2 cuts is left out."""
    for runtime in runtimes_in_use():
        stepped = runtime.memory(OutsideParameters).stepped
        is_known = runtime.world.axis("loss").size == 1 or any(each.optimizer() is optimizer for each in stepped)
        if not is_known and not any(isinstance(param, DTensor) for param in held.values()):
            stepped.append(_Stepped(weakref.ref(optimizer), _digest(held.values())))


def _digest(tensors: Any) -> int:
    return digest_of_text(repr([int(checksum(tensor)) for tensor in tensors]))


def _held(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    return [] if optimizer is None else [param for group in optimizer.param_groups for param in group["params"]]


def entries_of_outside(runtime: Runtime) -> dict[str, Entry]:
    """For the exchange at a window's end, before the window is counted: whether all ranks have the same values of such parameters."""
    if not _is_due(runtime):
        return {}
    memory = runtime.memory(OutsideParameters)
    memory.values = {}
    for number, (optimizer, first) in enumerate(memory.stepped):
        held = _held(optimizer())
        if any((found := memory.found.get(id(param))) is not None and found() is param for param in held):
            memory.values[number] = first, _digest(held)
    return {"outside": runtime.world.agreement.same(digest_of_text(repr(memory.values)))}


def refuse_drifted(runtime: Runtime, agreed: Mapping[str, Tensor], place: str) -> None:
    """Raises UsageError, on every rank, for parameters that were the same on all ranks before they were stepped, and are not now. ``agreed``: the
    exchanged entries."""
    memory = runtime.memory(OutsideParameters)
    if "outside" not in agreed or runtime.world.agreement.all_same(agreed["outside"]):
        return
    told = runtime.world.agreement.gather(memory.values, f"{place}, comparing parameters outside of the model")
    for number in sorted({number for values in told for number in values}):
        had = [values[number] for values in told if number in values]
        if len({first for first, _ in had}) == 1 and len({now for _, now in had}) > 1:
            optimizer = memory.stepped[number].optimizer() if number < len(memory.stepped) else None
            shapes = ", ".join(str(tuple(param.shape)) for param in _held(optimizer)[:3])
            raise UsageError(
                f"{type(optimizer).__name__}.step() of parameters that no sharded model has, of shapes {shapes}: ranks have other values of them now",
                why="nothing sums their gradients over the ranks (a loss's own parameter, a second network), so each rank steps them by its own samples",
                fix="put them in the model before parallelize: model = sw.TaskModel(model, loss); parallelize the second network too; or sum them before "
                'the step: p.grad = world.axis("loss").reduce(p.grad)',
            )
