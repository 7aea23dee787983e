"""The state of an optimizer of a sharded model in a checkpoint: what is written of it, by the names of its parameters, and how
another one gets it, under any layout."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise._torch.dtensor import local_tensor
from shardwise.errors import CheckpointError
from shardwise.model import dtype_name, dtype_of
from shardwise.model.large_pages import empty_in_large_pages
from shardwise.model.tensors import map_contained
from shardwise.parallel import Runtime
from shardwise.state.checkpoint.extra_objects import CutTensors
from shardwise.state.checkpoint.json_state import CutTensor, to_plain
from shardwise.state.given import Settled
from shardwise.state.integrity.manifest import damaged
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.optimizer import agreed_state, install_state, mapped_state, match_state, settings_of
from shardwise.state.optimizer_rest import rest_of, set_rest
from shardwise.state.stored import FileTensor, InMemoryTensor, TensorSource


def optimizer_state(
    runtime: Runtime, place: str, prefix: str, optim: torch.optim.Optimizer, tensors: dict[str, Tensor], cut: CutTensors
) -> Any:
    """What is saved of an optimizer of a sharded model, at ``place``; its sharded tensors are added to ``cut``, their names behind
    ``prefix``."""
    parts: dict[str, tuple[str, Tensor]] = {}
    state = _state_by_name(runtime, optim, prefix, parts)
    for stored, (param, tensor) in parts.items():
        cut.add(runtime, stored, param, tensor)
    return to_plain(state, place, tensors)


def _state_by_name(
    runtime: Runtime, optim: torch.optim.Optimizer, prefix: str, parts: dict[str, tuple[str, Tensor]]
) -> dict[str, Any]:
    """The state of an optimizer by the names of parameters; what is sharded is added to ``parts``, by ``prefix`` and its name:
    the parameter that it is sharded as, and this rank's part."""
    kinds, rest, shared = agreed_state(runtime, optim, "a checkpoint, taking down the optimizer's state")
    kept = {name: dict(optim.state.get(runtime.parameters[name], {})) for name in kinds}
    keys: dict[str, dict[str, str | None]] = {}
    plain: dict[str, dict[str, Any]] = {}

    def saved(name: str, place: str, value: Any) -> Any:
        if not kinds[name][place]:
            return local_tensor(value) if isinstance(value, Tensor) else value
        stored = f"{prefix}{name}/{place}"
        parts[stored] = name, local_tensor(value).detach()
        return CutTensor(stored, dtype_name(value.dtype), runtime.recipe.params[name].shape)

    for name, values in kept.items():
        for key, value in mapped_state(functools.partial(saved, name), values).items():
            is_cut = isinstance(value, CutTensor)
            keys.setdefault(name, {})[key] = value.dtype if is_cut else None
            if not is_cut:
                plain.setdefault(name, {})[key] = value
    return {
        "class": type(optim).__name__,
        "keys": keys,
        "state": plain,
        "param_groups": [settings_of(runtime, group, kinds) for group in optim.param_groups],
        **({} if rest is None else {"rest": rest}),
        **({"shared": shared} if shared else {}),
    }


class SavedOptimizer:
    """The state of one optimizer in a checkpoint, and the optimizer of this run that will get it.

    Args:
        runtime: of the model whose parameters it has.
        optim: may be new.

    Attributes:
        made: after :meth:`read`: name -> key -> this rank's value.
    """

    def __init__(
        self,
        folder: Path,
        runtime: Runtime,
        optim: torch.optim.Optimizer,
        saved: Mapping[str, Any],
        moments: Mapping[str, FileTensor],
        prefix: str,
    ):
        self._folder, self.runtime, self.optim = folder, runtime, optim
        self._moments, self._prefix = moments, prefix
        self.made: dict[str, dict[str, Any]] = {}
        state = self._state(saved)
        if saved["class"] != type(optim).__name__:
            raise CheckpointError(
                f"{folder}: the state of {saved['class']}",
                why=f"this run's optimizer is {type(optim).__name__}, and its state means something else",
                fix=f"build {saved['class']}, or load the weights only: sw.load_weights(model, {str(folder)!r})",
            )
        self._values, self.settings, self._rest, self._shared = match_state(runtime, optim, {**saved, "state": state})
        if prefix:  # those of the run's own are settled with it
            self.settings = Settled([{} for _ in self.settings]).settings(self.settings)

    def _state(self, saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        self._sources: dict[tuple[str, str], TensorSource] = {}  # name and place -> the full tensor, if it is one
        state: dict[str, dict[str, Any]] = {}
        for name, keys in saved["keys"].items():
            for key, dtype in keys.items():
                value = saved["state"].get(name, {}).get(key)
                if dtype is not None:
                    value = CutTensor(f"{self._prefix}{name}/{key}", dtype, ())
                state.setdefault(name, {})[key] = map_contained(functools.partial(self._opened, name), value, key)
        return state

    def _opened(self, name: str, place: str, value: Any) -> Any:
        """A tensor of the state of a parameter without its values, if they are in the files; anything else as it is."""
        if isinstance(value, Tensor):  # whole, as earlier versions have saved what is in a list
            self._sources[name, place] = InMemoryTensor.of(value)
        if not isinstance(value, CutTensor):
            return value
        param, stored = self.runtime.recipe.params.get(name), self._moments.get(value.stored)
        if stored is None or stored.dtype != value.dtype or param is None:
            raise damaged(self._folder, f"the optimizer's files have no {name}/{place} of {value.dtype}")
        if stored.shape != param.shape:
            raise CheckpointError(
                f"{self._folder}: {place} of shape {list(stored.shape)}",
                why=f"the parameter has {list(param.shape)}",
                fix="build the model that the checkpoint was saved from",
                name=name,
            )
        self._sources[name, place] = stored
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")

    def read(self, files: VerifiedFiles) -> None:
        def part(name: str, place: str, value: Any) -> Any:
            is_cut = isinstance(value, torch.dtype) and (name, place) in self._sources
            return part_of(self._sources[name, place], self.runtime, name, files) if is_cut else value

        self.made = {name: mapped_state(functools.partial(part, name), values) for name, values in self._values.items()}

    def note(self) -> str | None:
        """What the user should know: the checkpoint, of an earlier version, lacks what the optimizer keeps besides."""
        has_own = type(self.optim).state_dict is not torch.optim.Optimizer.state_dict
        if self._rest is not None or not has_own or rest_of(self.runtime, self.optim) is None:
            return None
        return f"{type(self.optim).__name__} keeps more than the state of its parameters, of which the checkpoint has nothing: it stays as it is now"

    def place(self) -> None:
        """Gives the optimizer the state of its parameters and the settings of its groups."""
        install_state(self.runtime, self.optim, self.made, self.settings, self._shared)

    def place_rest(self) -> None:
        """Gives it what it keeps besides, by its own ``load_state_dict``."""
        if self._rest is not None:
            set_rest(self.runtime, self.optim, self._rest)
            install_state(self.runtime, self.optim, self.made, self.settings, self._shared, has_rest=True)


def part_of(stored: TensorSource, runtime: Runtime, name: str, files: VerifiedFiles) -> Tensor:
    """This rank's part of a stored tensor, in new memory: cut as parameter ``name``; of a buffer all of it, in the shape that it
    was saved with."""
    shape = runtime.local_tensor_of(name).shape if name in runtime.recipe.params else stored.shape
    fresh = empty_in_large_pages(shape, dtype_of(stored.dtype))
    for piece, part in runtime.parts(name, fresh):
        stored.read(piece.box, part, files)
    return fresh
