"""Resuming from a checkpoint: chooses one, and checks that model, optimizer, counts and loader fit before any
changes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.config.suggest import did_you_mean
from shardwise.errors import CheckpointError, ConfigError
from shardwise.parallel import runtime_of
from shardwise.parallel.stale import refuse_no_optimizer
from shardwise.state.checkpoint.directory import Directory, OwnDirectories
from shardwise.state.checkpoint.position import check_states, dataset_states, put_dataset, trained_position
from shardwise.state.checkpoint.restore import Restored, restore
from shardwise.state.given import Change, Given, Settled, scheduler_changes, scheduler_settings
from shardwise.state.integrity.manifest import DamagedError

_NO_POSITION = (
    "no position in the data is saved: windows come from a sw.Loader that the manager does not know, and a resumed run would begin the epoch "
    "anew; iterate over ckpt.resume(loader), at the first start too"
)


class Step(Protocol):
    """The part of :class:`~shardwise.TrainStep` that checkpoints need."""

    model: nn.Module
    optim: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def check_state_dict(self, state: Mapping[str, Any]) -> None: ...


def check_step(step: Any) -> None:
    """Refuses an object that lacks an attribute of :class:`Step`."""
    wanted = ("model", "optim", "state_dict", "load_state_dict", "check_state_dict")
    lacking = [name for name in wanted if getattr(step, name, None) is None]
    if lacking:
        raise ConfigError(
            f"CheckpointManager(root, {type(step).__name__})",
            why=f"it has no {', '.join(lacking)}",
            fix="give the TrainStep: CheckpointManager(root, step)",
        )
    refuse_no_optimizer(step.optim, f"CheckpointManager(root, {type(step).__name__}), whose optim is")


class ResumePoint:
    """Saves and restores where a run is. All ranks must make it, and call it in the same way. Methods return notes for
    the user.

    Attributes:
        loader: the loader whose position is saved and restored; None: there is none yet.
        restored: the checkpoint that the run was resumed from; None: it started from the beginning.
        notes: what the user should know about the last save.
        left_behind: steps of checkpoints that were skipped, since they cannot be read.
    """

    def __init__(self, directory: Directory, step: Step, extra: Mapping[str, Any]):
        self._directory, self.step, self.extra = directory, step, dict(extra)
        self.loader: Any = None
        self.restored: Restored | None = None
        self.left_behind: list[int] = []
        self.notes: list[str] = []
        self._is_told, self._begun = False, 0
        own = getattr(step, "given", None)
        self.given = (
            own if isinstance(own, Given) else Given(runtime_of(step.model), step.optim, others=self.extra.values())
        )
        self._schedulers = {
            name: scheduler_settings(value)
            for name, value in self.extra.items()
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler)
        }

    def take(self, loader: Any, override: Sequence[str] = ()) -> list[str]:
        """Makes ``loader`` the run's loader. The first one is set to the run's position; if no checkpoint has been
        loaded, the newest one is."""
        refuse_unknown(override, self.given)
        if not all(hasattr(loader, name) for name in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"resume({type(loader).__name__})",
                why="it has no state_dict() and load_state_dict(), by which its position is saved",
                fix="use sw.Loader, or give it both methods",
            )
        is_first, self.loader = self.loader is None, loader
        if not is_first:
            return []
        self._begun = runtime_of(self.step.model).step
        if self.restored is None:
            return self.load_newest(override)[1]
        self._check(self.restored.own, override)  # load() was called before, without a loader to check
        return self._put_loader(self.restored)

    def position(self) -> Any:
        """The data position after the last trained window. Adds notes for the user to :attr:`notes`, once."""
        if self.loader is None:
            if runtime_of(self.step.model).reads_loader:
                self._tell([_NO_POSITION])
            return None
        num = runtime_of(self.step.model).step - self._begun
        is_counted = num or isinstance(getattr(self.step, "given", None), Given)  # the user's own loop may not count
        state, notes = trained_position(self.loader, num if is_counted else None)
        self._tell(notes)
        return state

    def dataset_states(self) -> dict[str, Any] | None:
        """The states of the stateful objects in the loader's dataset, on this rank."""
        states, notes = dataset_states(self.loader)
        self._tell(notes)
        return states

    def _tell(self, notes: Sequence[str]) -> None:
        if notes and not self._is_told:
            self._is_told = True
            self.notes += notes

    def load_newest(self, override: Sequence[str] = ()) -> tuple[int | None, list[str]]:
        """Restores the newest checkpoint that can be read; returns the windows trained before it (None if there is no
        checkpoint), and notes."""
        root, problems = self._directory.root, list[DamagedError]()
        for step in reversed(self._directory.steps()):
            try:
                loaded, notes = self._load(step, override)
            except DamagedError as error:
                problems.append(error)
                self.left_behind.append(step)
                continue
            return loaded, [
                *notes,
                *([f"resumed from step {step}, newer ones are skipped: {_told(problems)}"] if problems else []),
            ]
        if problems:
            raise CheckpointError(
                f"the checkpoints in {root}",
                why=f"none of them can be read: {_told(problems)}",
                fix="copy one there that is whole, or name another directory to start from the beginning",
            ) from problems[0]
        return None, []

    def load(self, step: int, override: Sequence[str] = ()) -> tuple[int, list[str]]:
        """Restores the checkpoint of ``step``; returns the windows trained before it, and notes."""
        root, steps = self._directory.root, self._directory.steps()
        if step not in steps:
            raise CheckpointError(
                f"the checkpoint of step {step} in {root}",
                why=f"there are those of {', '.join(map(str, steps))}" if steps else "there is none",
                fix="name one of them" if steps else "check the path",
            )
        return self._load(step, override)

    def _load(self, step: int, override: Sequence[str]) -> tuple[int, list[str]]:
        refuse_unknown(override, self.given)
        folder = self._directory.folder(step)
        if self.restored is None and runtime_of(self.step.model).step == 0:
            self.given.take()  # includes what the program has set by hand since it built the step

        def check(own: Mapping[str, Any]) -> Settled:
            self._check(own, override)
            return self._settled(own, override, folder)

        restored = restore(folder, self.step.model, self.step.optim, self.extra, check)
        self.step.load_state_dict(restored.own["step"])
        # The user's own loop does not set it: random streams must continue with the next window.
        runtime_of(self.step.model).step = restored.step
        notes = [*restored.notes, *self._put_loader(restored)]
        self.restored = restored
        runtime_of(self.step.model).memory(OwnDirectories).add(self._directory.root)
        return restored.step, notes

    def _check(self, own: Mapping[str, Any], override: Sequence[str]) -> None:
        self.step.check_state_dict(own["step"])
        if own.get("data") is not None:
            check_states(self.loader, own["data"]["ranks"], runtime_of(self.step.model).world.size, override)
        if self.loader is not None and own.get("loader") is not None and hasattr(self.loader, "check_state_dict"):
            self.loader.check_state_dict(own["loader"])

    def given_state(self) -> dict[str, Any]:
        """The settings that the program gave to optimizer, schedulers and scaler, for a checkpoint."""
        return {**self.given.state(), "extra": self._schedulers}

    def _settled(self, own: Mapping[str, Any], override: Sequence[str], folder: Path) -> Settled:
        saved = own.get("given")
        if saved is None:  # an older checkpoint, without the settings of its run
            return Settled([{} for _ in self.step.optim.param_groups])
        changes = self.given.changes(saved)
        for name, mine in self._schedulers.items():
            changes += scheduler_changes(f"scheduler extra[{name!r}]", mine, saved["extra"].get(name, {}), part="")
        refused = [change for change in changes if not (change.part and {change.name, change.part} & {*override})]
        if refused:
            raise changed(folder, refused, override)
        return self.given.settled(changes, own["step"])

    def _put_loader(self, restored: Restored) -> list[str]:
        """Restores the loader's position, if there is a loader; returns notes."""
        position = restored.own.get("loader")
        if self.loader is None:
            return []
        if position is None:
            return [f"{restored.folder} holds no position in the data: the data starts from the beginning"]
        self.loader.load_state_dict(position)
        runtime = runtime_of(self.step.model)
        self._begun = runtime.step
        data = restored.own.get("data")
        return put_dataset(self.loader, data and data["ranks"], runtime.world.rank, runtime.world.size)


def refuse_unknown(override: Sequence[str], given: Given) -> None:
    """Refuses names in ``override`` that are not settings of the run."""
    if isinstance(override, str) or not all(isinstance(name, str) for name in override):
        raise ConfigError(
            f"override={override!r}",
            why="it is a tuple of names of settings",
            fix=f"write override=({str(override)!r},)",
        )
    known = [*given.known(), "dataset"]
    for name in override:
        if name not in known:
            raise ConfigError(
                f"override={tuple(override)!r}",
                why=f"neither the optimizer's groups nor the scheduler or scaler of the step have a setting {name!r}",
                fix=did_you_mean(name, known, what="settings of this run"),
            )


def changed(folder: Path, refused: Sequence[Change], override: Sequence[str]) -> ConfigError:
    """The error for settings that differ from those of the saved run."""
    names = list(dict.fromkeys(change.name for change in refused))
    can = list(dict.fromkeys((*override, *(change.name for change in refused if change.part))))
    ways = ["give what the run had"]
    if any(change.part for change in refused):
        shown = "".join(f"{name!r}, " for name in can).removesuffix(" " if len(can) == 1 else ", ")
        ways.append(f"let the new values take effect: resume(loader, override=({shown}))")
    if any(not change.part for change in refused):
        ways.append("leave the scheduler out of extra=, and it starts from the beginning")
    return ConfigError(
        f"{', '.join(names)}: not as in the run that {folder} is of",
        why="\n       ".join(map(str, refused)) + "\n       the state in the checkpoint would put the old values back",
        fix="; or ".join(ways),
    )


def _told(problems: list[DamagedError]) -> str:
    return "; ".join(f"{error.given}: {error.why}" for error in problems)
