"""Parameters of no sharded model, such as a loss's own or those of a plain second network, that a window's backwards come to: nothing sums
their gradients over the ranks. Looked for in windows 0, 1, 2, 4, 8, ..., and refused when an optimizer steps with such a gradient as it is."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import Backward, path_of
from shardwise.errors import UsageError
from shardwise.model.tensors import checksum
from shardwise.parallel.runtime import Runtime, runtimes_in_use
from shardwise.world.agreement import Entry, digest_of_text


class OutsideParameters:
    """What a model's windows have come to besides.

    Attributes:
        found: id -> parameter, in this window, in the order in which backwards came to them.
        unsummed: id -> parameter, and the checksum of a gradient of it that is another one on other ranks.
    """

    def __init__(self) -> None:
        self.found: dict[int, nn.Parameter] = {}
        self.unsummed: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}


def is_due(runtime: Runtime) -> bool:
    """Whether such parameters are looked for in the window that is open; equal on every rank."""
    return runtime.world.axis("loss").size > 1 and not runtime.num_windows & (runtime.num_windows - 1)


def look_for_outside(runtime: Runtime, backward: Backward) -> None:
    """Notes the parameters of no sharded model that a backward of an open window comes to. Those of a padding, which counts nowhere, have the
    gradients from before it afterwards."""
    is_padding = runtime.accumulation is not None and runtime.accumulation.is_padding
    if not is_padding and not is_due(runtime):
        return
    given = {id(x) for x in backward.inputs}
    own = {
        id(each)
        for other in runtimes_in_use()
        for each in (*other.parameters.values(), *(copy for copy, _ in other.engine.gathered()))
    }
    for leaf in path_of(backward.outputs, past_marks=True).leaves:
        is_parameter = isinstance(leaf, nn.Parameter) and not isinstance(leaf, DTensor) and id(leaf) not in own
        if not is_parameter or (given and id(leaf) not in given):
            continue
        if is_padding:
            backward.until_end.callback(setattr, leaf, "grad", None if leaf.grad is None else leaf.grad.clone())
        else:
            runtime.memory(OutsideParameters).found[id(leaf)] = leaf  # type: ignore[assignment]


def entries_of_outside(runtime: Runtime) -> dict[str, Entry]:
    """For the exchange at a window's end, before the window is counted: whether all ranks have the same gradients of such parameters, as
    those have that a module of torch's own has summed in its backward."""
    if not is_due(runtime):
        return {}
    return {"outside": runtime.world.agreement.same(digest_of_text(repr(_sums(runtime))))}


def note_unsummed(runtime: Runtime, agreed: Mapping[str, Tensor], place: str) -> None:
    """Notes those whose gradients are another rank's in ``agreed``, the exchanged entries."""
    memory = runtime.memory(OutsideParameters)
    if "outside" in agreed and not runtime.world.agreement.all_same(agreed["outside"]):
        sums = _sums(runtime)
        everywhere = runtime.world.agreement.gather(sums, f"{place}, naming parameters outside of the model")
        for i, (key, param) in enumerate(memory.found.items()):
            if any(len(each) != len(sums) or each[i] != sums[i] for each in everywhere):
                memory.unsummed[key] = weakref.ref(param), sums[i]
    memory.found.clear()


def _sums(runtime: Runtime) -> list[int]:
    grads = (param.grad for param in runtime.memory(OutsideParameters).found.values())
    return [0 if grad is None else int(checksum(grad)) for grad in grads]


def refuse_unsummed(optimizer: torch.optim.Optimizer, held: Mapping[int, Tensor]) -> None:
    """Raises UsageError if ``optimizer`` steps a parameter by a gradient of this rank's samples alone, as a window has left it."""
    for runtime in runtimes_in_use():
        noted: dict[int, tuple[Any, int]] = runtime.memory(OutsideParameters).unsummed
        for key in noted.keys() & held.keys():
            ref, given = noted.pop(key)
            param: Any = ref()
            if param is held[key] and param.grad is not None and int(checksum(param.grad)) == given:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() with a parameter of shape {tuple(param.shape)} that no sharded model has, of whose gradient "
                    "each rank has its own samples'",
                    why="nothing sums it over the ranks (a loss's own parameter, a second network), so they would drift apart",
                    fix="put it in the model before parallelize: model = sw.TaskModel(model, loss); parallelize the second network too; or sum it before the "
                    'step: p.grad = world.axis("loss").reduce(p.grad)',
                )
