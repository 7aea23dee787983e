"""What ``extra`` objects keep of sharded models: optimizers, and tensors that are cut as a parameter is (averages of it). Both
are written and read in pieces, so that they go from any layout to any other."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.dtensor import cut_like, local_tensor
from shardwise.errors import CheckpointError, ConfigError
from shardwise.model import dtype_name
from shardwise.parallel import Runtime
from shardwise.parallel.runtime import has_runtime, runtimes_in_use
from shardwise.parallel.stale import replaced_name
from shardwise.state.checkpoint.plain import CutTensor
from shardwise.state.file_layout import SHARD_BYTES, FileLayout, PlannedFile, planned_files
from shardwise.state.views import View, view_of_all

__all__ = ["CutTensors", "is_sharded", "owner_of", "refit", "refuse_numbered", "wrapped"]


def is_sharded(value: Any) -> bool:
    """Whether an ``extra`` object is a sharded model, whose weights are saved like the model's."""
    return isinstance(value, nn.Module) and has_runtime(value)


def owner_of(name: str, value: Any) -> Runtime | None:
    """The sharded model whose optimizer an ``extra`` object is; None: it is no optimizer, or of plain parameters.

    Raises:
        ConfigError: it is an optimizer of more than one model, or of parameters that sharding has replaced.
    """
    if not isinstance(value, torch.optim.Optimizer):
        return None
    held = [param for group in value.param_groups for param in group["params"]]
    homes = {id(p): runtime for runtime in runtimes_in_use() for p in runtime.parameters.values()}
    owners = {id(homes.get(id(param))): homes.get(id(param)) for param in held}
    stale = next((found for param in held if (found := replaced_name(param)) is not None), None)
    if stale is None and len(owners) <= 1:
        return next(iter(owners.values()), None)
    raise ConfigError(
        f"extra[{name!r}]: {type(value).__name__}"
        + (
            " with a parameter that sharding has replaced"
            if stale is not None
            else " with parameters of more than one model"
        ),
        why="its state is saved by the names that its parameters have in the sharded model that they are of",
        fix="build an optimizer for each model, from model.parameters() after parallelize",
        name=stale,
    )


class CutTensors:
    """The tensors of ``extra`` objects that are cut as parameters are; equal on every rank but for the values."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Runtime, dict[str, tuple[str, Tensor]]]] = {}

    def add(self, runtime: Runtime, stored: str, name: str, tensor: Tensor) -> None:
        """Adds this rank's part of a tensor that is cut as parameter ``name``, to be written as ``stored``."""
        self._found.setdefault(id(runtime), (runtime, {}))[1][stored] = name, local_tensor(tensor).detach()

    def note(self, place: str, tensor: Tensor) -> CutTensor | None:
        """Adds a tensor of an object's state, and returns what stands for it there; None: it is not cut."""
        found = cut_as(tensor, place.rpartition("/")[2])
        if found is None:
            return None
        runtime, name = found
        self.add(runtime, place, name, tensor)
        return CutTensor(place, dtype_name(tensor.dtype), runtime.recipe.params[name].shape)

    def layouts(
        self, stem: str, align: Callable[[Iterable[int]], int]
    ) -> list[tuple[Runtime, FileLayout, dict[str, Tensor]]]:
        """The files of each model's tensors, and this rank's parts by their names there."""
        made = []
        for number, (runtime, tensors) in enumerate(self._found.values()):
            views: dict[str, View] = {
                n: view_of_all(p, runtime.recipe.params[p].shape) for n, (p, _) in tensors.items()
            }
            facts = {n: (views[n].shape, dtype_name(tensor.dtype)) for n, (_, tensor) in tensors.items()}
            sizes = (torch.Size(views[n].shape).numel() * tensor.itemsize for n, (_, tensor) in tensors.items())
            files: tuple[PlannedFile, ...] = planned_files(
                facts, max_shard_bytes=SHARD_BYTES, align=align(sizes), stem=f"{stem}{number or ''}"
            )
            made.append((runtime, FileLayout(files, views), {n: tensor for n, (_, tensor) in tensors.items()}))
        return made


def cut_as(tensor: Tensor, key: str) -> tuple[Runtime, str] | None:
    """A sharded model and the name of a parameter of it that ``tensor`` is cut as; None: it is not cut, or it does not show how.

    Args:
        tensor: a DTensor says itself how it is cut; a plain part of a parameter is known by its ``key``.
        key: under which it stands in an object's state.
    """
    for runtime in runtimes_in_use():
        for name, param in runtime.parameters.items():
            if isinstance(tensor, DTensor) and isinstance(param, DTensor):
                here = tensor.device_mesh, tensor.placements, tensor.shape
                if here == (param.device_mesh, param.placements, param.shape):
                    return runtime, name
            elif name == key and _is_part(tensor, param, runtime, name):
                return runtime, name
    return None


def _is_part(tensor: Tensor, param: Tensor, runtime: Runtime, name: str) -> bool:
    """Whether ``tensor`` has the shape of this rank's plain part of a parameter, which is smaller than the parameter."""
    plain = not isinstance(tensor, DTensor) and not isinstance(param, DTensor)
    return plain and tensor.shape == param.shape and tuple(param.shape) != runtime.recipe.params[name].shape


Take = Callable[[Any, Tensor, Runtime | None, str], Any]
"""``(stored, own, runtime, name)`` -> the value for a tensor of an object's state: ``stored`` is a :class:`CutTensor` or a full
tensor, ``own`` what the object has there, which is cut as parameter ``name`` (None: it is whole)."""


def refit(stored: Any, own: Any, place: str, take: Take) -> Any:
    """The saved state of an ``extra`` object, with its tensors cut as the object's own are.

    Args:
        stored: the state as it was saved.
        own: the state that the object has now.
        place: for messages.
        take: makes the tensors.

    Raises:
        CheckpointError: a tensor does not fit the object's own.
    """
    if isinstance(stored, dict):
        return type(stored)(
            {
                k: refit(v, own.get(k) if isinstance(own, Mapping) else None, f"{place}/{k}", take)
                for k, v in stored.items()
            }
        )
    if isinstance(stored, list | tuple):
        owns = own if isinstance(own, list | tuple) and len(own) == len(stored) else [None] * len(stored)
        return type(stored)(refit(v, owns[i], f"{place}/{i}", take) for i, v in enumerate(stored))
    if not isinstance(stored, Tensor | CutTensor):
        return stored
    found = cut_as(own, place.rpartition("/")[2]) if isinstance(own, Tensor) else None
    if found is not None:
        if tuple(stored.shape) != found[0].recipe.params[found[1]].shape:
            raise _unfit(place, stored, own)
        return take(stored, own, *found)
    if isinstance(own, DTensor) or (isinstance(own, Tensor) and _is_unnamed_part(stored, own)):
        raise _unfit(place, stored, own)
    if not isinstance(stored, CutTensor):
        return stored
    if not isinstance(own, Tensor) or tuple(own.shape) != stored.shape:
        raise _unfit(place, stored, own)
    return take(stored, own, None, "")


def refuse_numbered(place: str, state: Any) -> None:
    """Refuses the state of a torch optimizer of a sharded model in the state of another object: it is keyed by number.

    Raises:
        CheckpointError: there is one with tensors that are cut, or would be.
    """
    if not isinstance(state, Mapping):
        return
    for key, inner in state.items():
        refuse_numbered(f"{place}/{key}", inner)
    if not {"state", "param_groups"} <= state.keys() or not isinstance(state["state"], Mapping):
        return
    cut = {p.shape for runtime in runtimes_in_use() for p in runtime.recipe.params.values() if p.cuts}
    kept = [x for values in state["state"].values() if isinstance(values, Mapping) for x in values.values()]
    if any(isinstance(x, DTensor | CutTensor) or (isinstance(x, Tensor) and tuple(x.shape) in cut) for x in kept):
        raise CheckpointError(
            f"{place}: the state of an optimizer of a sharded model, inside of another object",
            why="torch keys it by number and has the whole tensors, and each rank steps a part",
            fix="give the optimizer itself: extra={'optim': optim}; it is saved by the names of its parameters",
            name=place,
        )


def _is_unnamed_part(stored: Tensor | CutTensor, own: Tensor) -> bool:
    return own.shape != tuple(stored.shape) and any(
        _is_part(own, param, runtime, name) and runtime.recipe.params[name].shape == tuple(stored.shape)
        for runtime in runtimes_in_use()
        for name, param in runtime.parameters.items()
    )


def _unfit(place: str, stored: Tensor | CutTensor, own: Any) -> CheckpointError:
    now = f"a tensor of shape {list(own.shape)}" if isinstance(own, Tensor) else "no tensor"
    return CheckpointError(
        f"{place}: a tensor of shape {list(stored.shape)}, for an object that has {now} there",
        why="it is cut over the ranks as the object's own tensor is, and that does not say how",
        fix="build the object from the model's parameters before the checkpoint is loaded, by their names in a dict; or keep a second sharded "
        "model in extra",
        name=place,
    )


def wrapped(local: Tensor, own: Tensor) -> Tensor:
    """This rank's part of a tensor, in the form of the object's own."""
    return cut_like(local.to(local_tensor(own).device), own) if isinstance(own, DTensor) else local.to(own.device)
