"""What ``extra`` objects keep of sharded models: optimizers, and tensors that are cut as a parameter is (averages of it). Both
are written and read in pieces, so that they go from any layout to any other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.dtensor import cut_like, local_tensor
from shardwise.errors import CheckpointError, ConfigError
from shardwise.model import dtype_name
from shardwise.parallel import Runtime
from shardwise.parallel.part_values import cut_of_part, marked_as
from shardwise.parallel.runtime import has_runtime, runtimes_in_use
from shardwise.parallel.stale import replaced_name
from shardwise.state.checkpoint.json_state import CutTensor

EXTRA = "extra"  # the folder of weights of further models, and the first part of the names of what extra objects keep
STATE_OF_ITS_OWN, WEIGHTS_OF_A_MODEL = "its own state", "the weights of a sharded model"
STATE_OF_AN_OPTIMIZER = "the state of a sharded model's optimizer, by the names of its parameters"


def is_sharded(value: Any) -> bool:
    """Whether an ``extra`` object is a sharded model, whose weights are saved like the model's."""
    return isinstance(value, nn.Module) and has_runtime(value)


def owner_of(name: str, value: Any) -> Runtime | None:
    """The sharded model whose optimizer an ``extra`` object is; None: it is no optimizer, or of plain parameters."""
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


def check_extra(extra: Mapping[str, Any]) -> None:
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"extra={extra!r:.80}", why="objects are saved under names", fix="use a mapping: extra={'average': average}"
        )
    for name, value in extra.items():
        has_both = all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))
        if not has_both:
            raise ConfigError(
                f"extra[{name!r}]: a {type(value).__name__}",
                why="it has no state_dict() and load_state_dict(), by which it is saved and restored",
                fix="give it both methods, or leave it out",
            )
        owner_of(name, value)  # raises for an optimizer that cannot be saved
        if not name.replace("_", "").replace("-", "").isalnum() or not name.isascii():
            raise ConfigError(
                f"extra[{name!r}]", why="the name becomes that of a file", fix="use letters, digits, - and _"
            )


def held_extra(state: Mapping[str, Any]) -> dict[str, str]:
    """Name -> what is saved of it, for the ``extra`` objects in a checkpoint with this state; see :func:`saved_of`."""
    weights = [prefix.removeprefix(f"{EXTRA}/").removesuffix("/") for prefix in state["model"] if prefix]
    return (
        dict.fromkeys(state["extra"], STATE_OF_ITS_OWN)
        | dict.fromkeys(weights, WEIGHTS_OF_A_MODEL)
        | dict.fromkeys(state.get("optimizers") or {}, STATE_OF_AN_OPTIMIZER)
    )


def saved_of(name: str, value: Any) -> str:
    if is_sharded(value):
        return WEIGHTS_OF_A_MODEL
    return STATE_OF_ITS_OWN if owner_of(name, value) is None else STATE_OF_AN_OPTIMIZER


class CutTensors:
    """The tensors of ``extra`` objects that are cut as parameters are; equal on every rank but for the values. ``models``: those that
    are saved with them."""

    def __init__(self, models: Sequence[Runtime]) -> None:
        self.models = models
        # Each model, and by their names in the files: the parameter that a tensor is cut as, and this rank's part.
        self.found: dict[int, tuple[Runtime, dict[str, tuple[str, Tensor]]]] = {}

    def add(self, runtime: Runtime, stored: str, name: str, tensor: Tensor) -> None:
        """Adds this rank's part of a tensor that is cut as parameter ``name``, to be written as ``stored``."""
        self.found.setdefault(id(runtime), (runtime, {}))[1][stored] = name, local_tensor(tensor).detach()

    def note(self, place: str, tensor: Tensor) -> CutTensor | None:
        """Adds a tensor of an object's state, and returns what stands for it there; None: it is not cut."""
        found = cut_as(tensor, place, self.models)
        if found is None:
            return None
        runtime, name = found
        self.add(runtime, place, name, tensor)
        return CutTensor(place, dtype_name(tensor.dtype), runtime.recipe.params[name].shape)


def cut_as(tensor: Tensor, place: str, models: Sequence[Runtime]) -> tuple[Runtime, str] | None:
    """A sharded model and the name of a parameter of it that ``tensor`` is cut as; None: it is not cut, or it does not show how.

    Args:
        tensor: what was computed from a part of a parameter knows the parameter. Else a DTensor says itself how its shards are cut,
            but not of what they are; a plain tensor is known by its key.
        place: of the tensor; its key there stands last.
        models: taken before others that are in use.
    """
    marked = cut_of_part(tensor)
    if marked is not None:
        runtime, name = marked
        if runtime is None or not _fits(tensor, runtime.parameters[name]):
            why = f"it is a part of {name} that is not cut as {name} is, or of a model that is gone"
            raise _unclear(place, tensor, why)
        return runtime, name
    runtimes = [*models, *(other for other in runtimes_in_use() if other not in models)]
    fitting = [(r, name) for r in runtimes for name, param in r.parameters.items() if _fits(tensor, param)]
    named = [(r, name) for r, name in fitting if name == place.rpartition("/")[2]]
    found = named or (fitting if isinstance(tensor, DTensor) else [])
    by_cuts = {(r.recipe.params[name].shape, r.recipe.params[name].cuts): name for r, name in found}
    if len(by_cuts) > 1:
        why = f"it does not show of which it is, and {' and '.join(by_cuts.values())} have that shape here and are cut differently"
        raise _unclear(place, tensor, why)
    if not found or isinstance(tensor, DTensor):
        return found[0] if found else None
    runtime, name = found[0]  # it is cut where this rank's tensor of the parameter is smaller than the parameter
    return found[0] if tuple(runtime.parameters[name].shape) != runtime.recipe.params[name].shape else None


def _fits(tensor: Tensor, param: Tensor) -> bool:
    """Whether both have one shape here, and are sharded alike."""
    if tensor.shape != param.shape or isinstance(tensor, DTensor) != isinstance(param, DTensor):
        return False
    if not isinstance(tensor, DTensor) or not isinstance(param, DTensor):
        return True
    return tensor.placements == param.placements and tensor.device_mesh == param.device_mesh


Take = Callable[[Any, Tensor, Runtime | None, str], Any]
"""``(stored, own, runtime, name)`` -> the value for a tensor of an object's state: ``stored`` is a :class:`CutTensor` or a full
tensor, ``own`` what the object has there, which is cut as parameter ``name`` (None: it is whole)."""


def refit(stored: Any, own: Any, place: str, take: Take, models: Sequence[Runtime]) -> Any:
    """The saved state of an ``extra`` object, with its tensors cut as the object's own are.

    Args:
        own: the state that the object has now.
    """
    if isinstance(stored, dict):
        return type(stored)(
            {
                k: refit(v, own.get(k) if isinstance(own, Mapping) else None, f"{place}/{k}", take, models)
                for k, v in stored.items()
            }
        )
    if isinstance(stored, list | tuple):
        owns = own if isinstance(own, list | tuple) and len(own) == len(stored) else [None] * len(stored)
        return type(stored)(refit(v, owns[i], f"{place}/{i}", take, models) for i, v in enumerate(stored))
    if not isinstance(stored, Tensor | CutTensor):
        return stored
    found = cut_as(own, place, models) if isinstance(own, Tensor) else None
    if found is not None:
        if tuple(stored.shape) != found[0].recipe.params[found[1]].shape:
            raise _unfit(place, stored, own)
        return take(stored, own, *found)
    if isinstance(own, DTensor) or _lacks_name(stored, own, models):
        raise _unfit(place, stored, own)
    if not isinstance(stored, CutTensor):
        return stored
    if not isinstance(own, Tensor) or tuple(own.shape) != stored.shape:
        raise _unfit(place, stored, own)
    return take(stored, own, None, "")


def _lacks_name(stored: Tensor | CutTensor, own: Any, models: Sequence[Runtime]) -> bool:
    """Whether ``own`` has the shape of a part, and ``stored`` that of the whole."""
    return isinstance(own, Tensor) and any(
        runtime.recipe.params[name].shape == tuple(stored.shape) != own.shape == param.shape
        for runtime in models
        for name, param in runtime.parameters.items()
    )


def refuse_numbered(place: str, state: Any, models: Sequence[Runtime]) -> None:
    """Refuses the state of a torch optimizer of a sharded model in the state of another object: it is keyed by number.
    ``models``: those that are saved, or loaded, with it."""
    if not isinstance(state, Mapping):
        return
    for key, inner in state.items():
        refuse_numbered(f"{place}/{key}", inner, models)
    if not {"state", "param_groups"} <= state.keys() or not isinstance(state["state"], Mapping):
        return
    cut = {p.shape for runtime in models for p in runtime.recipe.params.values() if p.cuts}
    kept = [x for values in state["state"].values() if isinstance(values, Mapping) for x in values.values()]
    if any(isinstance(x, DTensor | CutTensor) or (isinstance(x, Tensor) and tuple(x.shape) in cut) for x in kept):
        raise CheckpointError(
            f"{place}: the state of an optimizer of a sharded model, inside of another object",
            why="torch keys it by number and has the whole tensors, and each rank steps a part",
            fix="give the optimizer itself: extra={'optim': optim}; it is saved by the names of its parameters",
            name=place,
        )


def _unclear(place: str, tensor: Tensor, why: str) -> CheckpointError:
    return CheckpointError(
        f"a tensor of shape {list(tensor.shape)} on this rank, and how it is cut is not known",
        why=why,
        fix="keep what is made of parameters (p.detach().clone(), zeros_like(p)) in a dict by their names; or a second sharded model in extra",
        name=place,
    )


def _unfit(place: str, stored: Tensor | CutTensor, own: Any) -> CheckpointError:
    now = f"a tensor of shape {list(own.shape)}" if isinstance(own, Tensor) else "no tensor"
    return CheckpointError(
        f"{place}: a tensor of shape {list(stored.shape)}, for an object that has {now} there",
        why="it is cut over the ranks as the object's own tensor is, and that does not say how",
        fix="build it from the model's parameters before it is loaded, by their names in a dict; or keep a second sharded model in extra",
        name=place,
    )


def wrapped(local: Tensor, own: Tensor) -> Tensor:
    """This rank's part of a tensor, in the form of the object's own."""
    made = cut_like(local.to(local_tensor(own).device), own) if isinstance(own, DTensor) else local.to(own.device)
    return marked_as(made, own)
