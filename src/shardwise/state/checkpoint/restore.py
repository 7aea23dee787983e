"""Restores a run from a checkpoint, under any layout: everything is read and verified first, then put in place.

Nothing of the run changes before every rank has read and verified all that it needs. Until then this rank's shards are
in host memory a second time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.model.large_pages import empty_in_large_pages
from shardwise.parallel import Runtime, runtime_of
from shardwise.state.checkpoint.contents import EXACT, EXTRA, held_extra, is_sharded
from shardwise.state.checkpoint.opened import SavedRun
from shardwise.state.extra import set_extra_states
from shardwise.state.formats import open_folder
from shardwise.state.given import Settled
from shardwise.state.integrity.manifest import DamagedError, damaged
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.load_transaction import LoadTransaction
from shardwise.state.match import LoadPlan, Rules, own_boxes, plan_of
from shardwise.state.optimizer import install_state, match_state
from shardwise.state.own_load import give_attributes
from shardwise.state.stored import FileTensor
from shardwise.world.collectively import collectively
from shardwise.world.rng import set_streams

__all__ = ["Restored", "restore"]


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
        folder: the checkpoint.
        step: windows trained before it.
        own: the saved state of the step and the loader.
        num_bytes: bytes read by this rank.
        notes: what the user should know.
    """

    folder: Path
    step: int
    own: Mapping[str, Any]
    num_bytes: int
    notes: tuple[str, ...]


def restore(
    folder: Path,
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], Settled | None] = lambda own: None,
) -> Restored:
    """Restores a model, its optimizer and ``extra`` objects from a checkpoint. All ranks must call it.

    Args:
        folder: of the checkpoint.
        model: from ``parallelize``, under any layout.
        optim: built from its parameters; may be new. None: the optimizer's state is not restored.
        extra: the objects to restore, under the names they were saved with.
        check: called with the saved state of step and loader, before anything changes; raises if it does not fit, and
            returns settings that replace saved ones.

    Raises:
        CheckpointError: on every rank; it is not complete, fails its checksums, or is of another model. Nothing has
            changed.
    """
    runtime = runtime_of(model)
    world, place = runtime.world, f"restoring {folder.name}"
    saved = collectively(
        world, f"{place}, reading the manifest", lambda: SavedRun(folder), same=_digest, differ=_other(folder)
    )
    with saved:
        reading = _Reading(saved, runtime, optim, extra)
        collectively(world, f"{place}, matching names", lambda: reading.match(check))
        collectively(world, f"{place}, reading", reading.read)
        reading.place()
        collectively(world, f"{place}, giving extra objects their state", reading.place_extra)
        return Restored(folder, saved.manifest.step, reading.own, saved.files.num_bytes, tuple(reading.notes))


def _digest(saved: SavedRun) -> str:
    return f"{saved.manifest.step} {saved.manifest.to_bytes().hex()}"


def _other(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder}",
        why="ranks see different ones under this name",
        fix="name a directory on a file system that every node mounts",
    )


class _Reading:
    """One restore on one rank, in three stages: match, read, put in place."""

    def __init__(
        self, saved: SavedRun, runtime: Runtime, optim: torch.optim.Optimizer | None, extra: Mapping[str, Any]
    ):
        self.saved, self.runtime, self.optim, self.extra = saved, runtime, optim, extra
        self.notes: list[str] = []
        self.own: dict[str, Any] = {}
        self._models: dict[str, tuple[Runtime, LoadPlan]] = {}
        self._values: dict[str, dict[str, Tensor]] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._made: dict[str, dict[str, Any]] = {}

    def match(self, check: Callable[[Mapping[str, Any]], Settled | None]) -> None:
        """Checks everything that can be checked without reading a large tensor."""
        try:
            self._match(check)
        except ShardwiseError:
            raise
        except Exception as error:  # the state's form is right, but a value in it was never saved by this library
            raise damaged(
                self.saved.folder, f"its state does not fit together: {type(error).__name__}: {error}"
            ) from error

    def _match(self, check: Callable[[Mapping[str, Any]], Settled | None]) -> None:
        state, self._moments = self.saved.state()
        needed = ("optimizer", "model", "extra", "random") if self.optim is not None else ("model", "extra", "random")
        missing = [name for name in needed if name not in state]
        if missing:
            raise CheckpointError(
                f"{self.saved.folder}: a checkpoint without {', '.join(missing)}",
                why="it was saved from a run that had none",
                fix="build the step as it was when the checkpoint was saved",
            )
        self._match_extra(state)
        models = {"": self.runtime}
        models |= {f"{EXTRA}/{n}/": runtime_of(other) for n, other in self.extra.items() if is_sharded(other)}
        for prefix, runtime in models.items():
            self._models[prefix] = (runtime, self._plan(prefix, runtime, state["model"].get(prefix) or {}))
        if self.optim is not None:
            self._match_optimizer(self.optim, state["optimizer"])
        self._state = state
        self.own = {
            name: value for name, value in state.items() if name not in ("optimizer", "model", "extra", "random")
        }
        settled = check(self.own)
        if settled is not None and self.optim is not None:
            self._settings = settled.settings(self._settings)
            self.own["step"] = {**self.own["step"], **settled.step}

    def _plan(self, prefix: str, runtime: Runtime, values: Mapping[str, Any]) -> LoadPlan:
        rules = Rules(strict=True, rename=(), cast=False, check_finite=False)
        folder = self.saved.folder / prefix if prefix else self.saved.folder
        try:
            return plan_of(
                runtime,
                replace(open_folder(folder), values=values),
                rules,
                self.saved.files,
                lambda name, tensor: own_boxes(runtime, name, tensor),
                self.saved.tensors(prefix + EXACT),
            )
        except DamagedError:
            raise
        except CheckpointError as error:  # of another model: the fix of this error is for weights only
            error.fix = (
                "build the model that the checkpoint was saved from, or name another directory; to begin a run with what fits: "
                f"sw.load_weights(model, {str(folder)!r}, strict=False)"
            )
            raise

    def _match_extra(self, state: Mapping[str, Any]) -> None:
        held = held_extra(state)
        for name, value in self.extra.items():
            if held.get(name) != is_sharded(value):
                other = "its own state" if is_sharded(value) else "the weights of a sharded model"
                raise CheckpointError(
                    f"{self.saved.folder}: a checkpoint without extra[{name!r}]",
                    why=f"under that name it has {other}"
                    if name in held
                    else f"it was saved with {', '.join(held) or 'no extra objects'}",
                    fix="load it with a manager that is not given the object, then save with one that is",
                )
        self.notes += [
            f"extra[{name!r}] is in the checkpoint, and nothing takes it" for name in held if name not in self.extra
        ]

    def _match_optimizer(self, optim: torch.optim.Optimizer, told: Mapping[str, Any]) -> None:
        shapes = {name: param.shape for name, param in self.runtime.recipe.params.items()}
        state: dict[str, dict[str, Any]] = {}
        for name, keys in told["keys"].items():
            for key, dtype in keys.items():
                value = told["state"].get(name, {}).get(key)
                if dtype is not None:
                    stored = self._moments.get(f"{name}/{key}")
                    if stored is None or stored.dtype != dtype or name not in shapes:
                        raise damaged(self.saved.folder, f"the optimizer's files have no {name}/{key} of {dtype}")
                    if stored.shape != shapes[name]:
                        raise CheckpointError(
                            f"{self.saved.folder}: {key} of shape {list(stored.shape)}",
                            why=f"the parameter has {list(shapes[name])}",
                            fix="build the model that the checkpoint was saved from",
                            name=name,
                        )
                    value = torch.empty(stored.shape, dtype=getattr(torch, dtype), device="meta")
                state.setdefault(name, {})[key] = value
        if told["class"] != type(optim).__name__:
            raise CheckpointError(
                f"{self.saved.folder}: the state of {told['class']}",
                why=f"this run's optimizer is {type(optim).__name__}, and its state means something else",
                fix=f"build {told['class']}, or load the weights only: sw.load_weights(model, {str(self.saved.folder)!r})",
            )
        self._told, self._settings = match_state(
            self.runtime, optim, {"state": state, "param_groups": told["param_groups"]}
        )

    def read(self) -> None:
        """Reads all of this rank's shards into new memory."""
        files = self.saved.files
        for prefix, (runtime, plan) in self._models.items():
            local = runtime.local_tensors()
            self._values[prefix] = {}
            for name, stored in plan.tensors.items():
                fresh = empty_in_large_pages(local[name].shape, local[name].dtype)
                for piece, part in runtime.parts(name, fresh):
                    stored.read(piece.box, part, files)
                self._values[prefix][name] = fresh
            self._attributes[prefix] = plan.own.attributes(files) if plan.own is not None else {}
        if self.optim is None:
            return
        for name, keys in self._told.items():
            self._made[name] = {
                key: self._moment(name, key, value, files) if isinstance(value, torch.dtype) else value
                for key, value in keys.items()
            }

    def _moment(self, name: str, key: str, dtype: torch.dtype, files: VerifiedFiles) -> Tensor:
        local = self.runtime.local_tensor_of(name)
        stored: FileTensor = self._moments[f"{name}/{key}"]
        fresh = empty_in_large_pages(local.shape, dtype)
        for piece, part in self.runtime.parts(name, fresh):
            stored.read(piece.box, part, files)
        return fresh

    def place(self) -> None:
        """Copies into the run what was read; from here on the checkpoint cannot cause an error."""
        for prefix, (runtime, plan) in self._models.items():
            local = runtime.local_tensors()
            with LoadTransaction(runtime, local, plan.tensors):
                for name, value in self._values[prefix].items():
                    local[name].copy_(value)
            runtime.loaded_from = (self.saved.folder / prefix).resolve()
            give_attributes(runtime.module, self._attributes[prefix], runtime.world.device)
            states = self._state["model"].get(prefix) or {}
            if states:
                set_extra_states(runtime.module, states)
        if self.optim is not None:
            install_state(self.runtime, self.optim, self._made, self._settings)
        self._place_random(self._state["random"])

    def place_extra(self) -> None:
        """Loads the state of the user's ``extra`` objects, whose code may fail on one rank only."""
        for name, value in self.extra.items():
            if not is_sharded(value):
                value.load_state_dict(self._state["extra"][name])

    def _place_random(self, random: Mapping[str, Any]) -> None:
        world = self.runtime.world
        given, world.seed = world.seed, int(random["seed"])
        if given != world.seed:
            self.notes.append(f"the seed is {world.seed}, that of the saved run; sw.init was given {given}")
        if len(random["ranks"]) == world.size:
            set_streams(random["ranks"][world.rank], world.device)
        else:
            self.notes.append(
                f"random streams outside of steps start from their seed: the checkpoint has those of {len(random['ranks'])} ranks, and "
                f"there are {world.size}"
            )
