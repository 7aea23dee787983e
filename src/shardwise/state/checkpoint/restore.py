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

from shardwise.errors import CheckpointError
from shardwise.parallel import Runtime, runtime_of
from shardwise.state.checkpoint.extra_objects import (
    EXTRA,
    Take,
    held_extra,
    is_sharded,
    owner_of,
    refit,
    refuse_numbered,
    saved_of,
    wrapped,
)
from shardwise.state.checkpoint.json_state import CutTensor
from shardwise.state.checkpoint.optimizers import SavedOptimizer, part_of
from shardwise.state.checkpoint.saved_run import SavedRun
from shardwise.state.checkpoint.sharded_files import CUT, EXACT
from shardwise.state.extra_state import set_extra_states
from shardwise.state.formats.folder import open_folder
from shardwise.state.given import Settled
from shardwise.state.integrity.manifest import DamagedError, damaged
from shardwise.state.left_base import LeftBase, digests, refuse_other_base
from shardwise.state.load_transaction import load_transaction
from shardwise.state.match import LoadPlan, Rules, own_boxes, plan_of
from shardwise.state.meaning import refuse_other_meaning
from shardwise.state.origin import note_beside, note_resume
from shardwise.state.own_load import give_attributes
from shardwise.state.stored import InMemoryTensor
from shardwise.world.collectively import collectively
from shardwise.world.rng import set_streams


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
        own: the saved state of the step and the loader.
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
        world,
        f"{place}, reading the manifest",
        lambda: SavedRun(folder),
        same=lambda saved: f"{saved.manifest.step} {saved.manifest.to_bytes().hex()}",
        differ=CheckpointError(
            f"the checkpoint {folder}",
            why="ranks see different ones under this name",
            fix="name a directory on a file system that every node mounts",
        ),
    )
    with saved:
        base = collectively(world, f"{place}, reading what it leaves out", saved.left_base)
        reading = _Reading(saved, runtime, optim, extra)
        if base is not None:
            collectively(world, f"{place}, beside its base", lambda: _refuse_no_base(folder, base, runtime))
            local = runtime.local_tensors()
            reading.base, reading.digests = base, digests(runtime, [name for name in base.tensors if name in local])
        collectively(world, f"{place}, matching names", lambda: reading.match(check))
        collectively(world, f"{place}, reading", reading.read)
        reading.place()
        collectively(world, f"{place}, giving extra objects their state", reading.place_extra)
        return Restored(folder, saved.manifest.step, reading.own, saved.files.num_bytes, tuple(reading.notes))


def _refuse_no_base(folder: Path, base: LeftBase, runtime: Runtime) -> None:
    if runtime.pending is not None:
        raise CheckpointError(
            f"{folder}: a checkpoint without the frozen weights of its model",
            why=f"the model has no values yet, and these were left where they are: {base.place}",
            fix=f"load them first: sw.load_weights(model, {(base.folder or 'DIRECTORY')!r})",
        )


class _Reading:
    """One restore on one rank, in three stages: match, read, put in place."""

    def __init__(
        self, saved: SavedRun, runtime: Runtime, optim: torch.optim.Optimizer | None, extra: Mapping[str, Any]
    ):
        self.saved, self.runtime, self.optim, self.extra = saved, runtime, optim, extra
        self.notes: list[str] = []
        self.own: dict[str, Any] = {}
        self.base: LeftBase | None = None  # which the checkpoint does not hold
        self.digests: dict[str, str] = {}  # of these tensors in the model
        self._models: dict[str, tuple[Runtime, LoadPlan]] = {}
        self._values: dict[str, dict[str, Tensor]] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._optimizers: dict[str, SavedOptimizer] = {}  # by the names of extra; "": the run's own
        self._extra: dict[str, Any] = {}

    def match(self, check: Callable[[Mapping[str, Any]], Settled | None]) -> None:
        """Checks everything that can be checked without reading a large tensor."""
        with (
            self.saved.as_written()
        ):  # the state's form may be right, and a value in it was never saved by this library
            self._match(check)

    def _match(self, check: Callable[[Mapping[str, Any]], Settled | None]) -> None:
        state, moments = self.saved.state()
        self._cut = self.saved.tensors(CUT)
        needed = ("optimizer", "model", "extra", "random") if self.optim is not None else ("model", "extra", "random")
        missing = [name for name in needed if name not in state]
        if missing:
            raise CheckpointError(
                f"{self.saved.folder}: a checkpoint without {', '.join(missing)}",
                why="it was saved from a run that had none",
                fix="build the step as it was when the checkpoint was saved",
            )
        if self.base is not None:
            refuse_other_base(self.runtime, self.base, self.digests, self.saved.folder)
        self._match_extra(state)
        models = {"": self.runtime}
        models |= {f"{EXTRA}/{n}/": runtime_of(other) for n, other in self.extra.items() if is_sharded(other)}
        for prefix, runtime in models.items():
            self._models[prefix] = (runtime, self._plan(prefix, runtime, state["model"].get(prefix) or {}))
            self._refuse_other_buffers(prefix, state.get("buffers"))
            said = (state.get("meaning") or {}).get(prefix, {})
            refuse_other_meaning(self._models[prefix][0].recipe, said, self.saved.folder)
        windows = state.get("windows", {})  # of other models; a checkpoint of an earlier version has none
        if not isinstance(windows, dict) or any(type(num) is not int or num < 0 for num in windows.values()):
            raise damaged(self.saved.folder, "its numbers of windows are none")
        if self.optim is not None:
            told = state["optimizer"]
            self._optimizers[""] = SavedOptimizer(self.saved.folder, self.runtime, self.optim, told, moments, "")
        for name, value in self.extra.items():
            if (owner := owner_of(name, value)) is not None:
                told = state["optimizers"][name]
                self._optimizers[name] = SavedOptimizer(
                    self.saved.folder, owner, value, told, self._cut, f"{EXTRA}/{name}/"
                )
            elif not is_sharded(value) and not isinstance(value, torch.optim.Optimizer):
                refuse_numbered(f"{EXTRA}/{name}", state["extra"][name], self._runtimes)
                self._refit(name, state["extra"][name], lambda stored, *_: stored)  # it is checked
        self.notes += [note for optimizer in self._optimizers.values() if (note := optimizer.note())]
        self._state = state
        self.own = {
            name: value
            for name, value in state.items()
            if name
            not in ("optimizer", "optimizers", "model", "extra", "random", "windows", "buffers", "meaning", "origin")
        }
        settled = check(self.own)
        if settled is not None and self.optim is not None:
            self._optimizers[""].settings = settled.settings(self._optimizers[""].settings)
            self.own["step"] = {**self.own["step"], **settled.step}

    def _plan(self, prefix: str, runtime: Runtime, values: Mapping[str, Any]) -> LoadPlan:
        left = frozenset(self.base.tensors) if self.base is not None and not prefix else frozenset[str]()
        rules = Rules(
            strict=True, rename=(), cast=False, check_finite=False, needs_own=True, buffers_as_stored=True, left=left
        )
        folder = self.saved.folder / prefix if prefix else self.saved.folder
        try:
            plan = plan_of(
                runtime,
                replace(open_folder(folder), values=values),
                rules,
                self.saved.files,
                lambda name, tensor: own_boxes(runtime, name, tensor),
                self.saved.tensors(prefix + EXACT),
            )
            if plan.to_pack:
                raise CheckpointError(
                    f"{self.saved.folder}: a checkpoint of a model with plain weights",
                    why="this model stores them packed: a run goes on with the numbers that it had",
                    fix="load its weights, which packs them, and begin a run",
                    name=next(iter(plan.to_pack)),
                )
            return plan
        except DamagedError:
            raise
        except CheckpointError as error:  # of another model: the fix of this error is for weights only
            error.fix = (
                "build the model that the checkpoint was saved from, or name another directory; to begin a run with what fits: "
                f"sw.load_weights(model, {str(folder)!r}, strict=False)"
            )
            raise

    def _refuse_other_buffers(self, prefix: str, buffers: Mapping[str, Any] | None) -> None:
        """Refuses buffers of another shape or dtype than they had when they were saved. ``buffers``: of the state; None: it is of an
        earlier version."""
        runtime, plan = self._models[prefix]
        if buffers is None:
            return
        saved = buffers.get(prefix, {})
        for name in saved.keys() & runtime.recipe.buffers.keys() & plan.tensors.keys():
            stored, (shape, dtype) = plan.tensors[name], saved[name]
            if (list(stored.shape), stored.dtype) != (list(shape), dtype):
                raise damaged(self.saved.folder, f"{name} is not of the shape and dtype that its state says")

    def _match_extra(self, state: Mapping[str, Any]) -> None:
        held = held_extra(state)
        for name, value in self.extra.items():
            if held.get(name) != saved_of(name, value):
                raise CheckpointError(
                    f"{self.saved.folder}: a checkpoint without extra[{name!r}]",
                    why=f"under that name it has {held[name]}, and the object would take {saved_of(name, value)}"
                    if name in held
                    else f"it was saved with {', '.join(held) or 'no extra objects'}",
                    fix="load it with a manager that is not given the object, then save with one that is",
                )
        self.notes += [
            f"extra[{name!r}] is in the checkpoint, and nothing takes it" for name in held if name not in self.extra
        ]

    def read(self) -> None:
        """Reads all of this rank's shards into new memory."""
        files = self.saved.files
        for prefix, (runtime, plan) in self._models.items():
            self._values[prefix] = {}
            for name, stored in plan.tensors.items():
                self._values[prefix][name] = part_of(stored, runtime, name, files)
            self._attributes[prefix] = plan.own.attributes(files) if plan.own is not None else {}
        for saved in self._optimizers.values():
            saved.read(files)
        for name, value in self.extra.items():
            told = self._state["extra"].get(name)
            if isinstance(value, torch.optim.Optimizer) and name not in self._optimizers:
                self._extra[name] = told  # of plain parameters
            elif name in self._state["extra"]:
                self._extra[name] = self._refit(name, told, self._cut_as_own)

    @property
    def _runtimes(self) -> list[Runtime]:
        return [runtime for runtime, _ in self._models.values()]

    def _refit(self, name: str, told: Any, take: Take) -> Any:
        return refit(told, self.extra[name].state_dict(), f"{EXTRA}/{name}", take, self._runtimes)

    def _cut_as_own(self, stored: Any, own: Tensor, runtime: Runtime | None, name: str) -> Tensor:
        """A tensor of an extra object's state, cut as the object's own is."""
        source = self._cut[stored.stored] if isinstance(stored, CutTensor) else InMemoryTensor.of(stored)
        if runtime is None:
            return source.load(self.saved.files)
        return wrapped(part_of(source, runtime, name, self.saved.files), own)

    def place(self) -> None:
        """Copies into the run what was read; from here on the checkpoint cannot cause an error."""
        for prefix, (runtime, plan) in self._models.items():
            local = runtime.local_tensors()
            with load_transaction(runtime, local, plan.tensors):
                buffers = runtime.buffers()
                for name, value in self._values[prefix].items():
                    if local[name].shape == value.shape and local[name].dtype == value.dtype:
                        local[name].copy_(value)
                    else:
                        buffers[name].data = value.to(local[name].device)
            if self.base is None or prefix:
                note_resume(runtime, self._state.get("origin", {}).get(prefix), self.saved.folder / prefix)
            else:  # the base is where it was
                note_beside(runtime, self.base.folder)
            give_attributes(runtime.module, self._attributes[prefix], runtime.world.device)
            runtime.step = self._state.get("windows", {}).get(prefix, runtime.step)
            states = self._state["model"].get(prefix) or {}
            if states:
                set_extra_states(runtime.module, states)
        for saved in self._optimizers.values():
            saved.place()
        self._place_random(self._state["random"])

    def place_extra(self) -> None:
        """Loads the state of the user's optimizers and ``extra`` objects, whose code may fail on one rank only."""
        for saved in self._optimizers.values():
            saved.place_rest()
        for name, value in self.extra.items():
            if name in self._extra:
                value.load_state_dict(self._extra[name])

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
