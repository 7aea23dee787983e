"""Going back to a checkpoint: which one is taken, and whether model, optimizer, counts and loader fit it before any changes."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.errors import CheckpointError, ConfigError
from shardwise.state.checkpoint.directory import Directory
from shardwise.state.checkpoint.restore import Restored, restore
from shardwise.state.vouched.manifest import DamagedError

__all__ = ["Returning", "Step", "check_step"]


class Step(Protocol):
    """What is asked of a :class:`~shardwise.TrainStep`."""

    model: nn.Module
    optim: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def check_state_dict(self, state: Mapping[str, Any]) -> None: ...


def check_step(step: Any) -> None:
    """Refuses what lacks something of :class:`Step`.

    Raises:
        ConfigError: with what it lacks.
    """
    wanted = ("model", "optim", "state_dict", "load_state_dict", "check_state_dict")
    lacking = [name for name in wanted if getattr(step, name, None) is None]
    if lacking:
        raise ConfigError(
            f"CheckpointManager(root, {type(step).__name__})",
            why=f"it has no {', '.join(lacking)}",
            fix="give the TrainStep: CheckpointManager(root, step)",
        )


class Returning:
    """All ranks must make it, and call it alike. Methods give what the user should know, as notes.

    Attributes:
        step: what is put back, with its model and its optimizer.
        extra: further objects that are, by name.
        loader: the loader whose place is saved and restored; None: there is none yet.
        restored: the checkpoint that the run has gone on from; None: it began anew.
        left_behind: steps of checkpoints that were passed over, since they cannot be read.
    """

    def __init__(self, directory: Directory, step: Step, extra: Mapping[str, Any]):
        self._directory, self.step, self.extra = directory, step, dict(extra)
        self.loader: Any = None
        self.restored: Restored | None = None
        self.left_behind: list[int] = []

    def take(self, loader: Any) -> list[str]:
        """From here on ``loader`` is the run's. The first is put where the run is: where that has yet to be found, at the
        newest checkpoint.

        Raises:
            CheckpointError: as :meth:`load_newest` says.
            ConfigError: a loader that cannot say where it is.
        """
        if not all(hasattr(loader, name) for name in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"resume({type(loader).__name__})",
                why="it has no state_dict() and load_state_dict(), by which its position is saved",
                fix="use sw.Loader, or give it both methods",
            )
        is_first, self.loader = self.loader is None, loader
        if not is_first:
            return []
        if self.restored is None:
            return self.load_newest()[1]
        self._check(self.restored.own)  # load() came first, and had nobody to tell
        return self._put_loader(self.restored)

    def position(self) -> Any:
        """Where the loader is."""
        return None if self.loader is None else self.loader.state_dict()

    def load_newest(self) -> tuple[int | None, list[str]]:
        """Goes back to the newest checkpoint that can be read; windows trained before it, None where there is none.

        Raises:
            CheckpointError: there are some, and none can be read; or one is of another model.
        """
        root, problems = self._directory.root, list[DamagedError]()
        for step in reversed(self._directory.steps()):
            try:
                loaded, notes = self._load(step)
            except DamagedError as error:
                problems.append(error)
                self.left_behind.append(step)
                continue
            return loaded, [*notes, *([f"resumed from step {step}: {_told(problems)}"] if problems else [])]
        if problems:
            raise CheckpointError(
                f"the checkpoints in {root}",
                why=f"none of them can be read: {_told(problems)}",
                fix="copy one there that is whole, or name another directory to start anew",
            ) from problems[0]
        return None, []

    def load(self, step: int) -> tuple[int, list[str]]:
        """Goes back to the checkpoint of ``step``; windows trained before it.

        Raises:
            CheckpointError: there is none, it cannot be read, or it is of another model.
        """
        root, steps = self._directory.root, self._directory.steps()
        if step not in steps:
            raise CheckpointError(
                f"the checkpoint of step {step} in {root}",
                why=f"there are those of {', '.join(map(str, steps))}" if steps else "there is none",
                fix="name one of them" if steps else "look for a slip in the path",
            )
        return self._load(step)

    def _load(self, step: int) -> tuple[int, list[str]]:
        folder = self._directory.folder(step)
        restored = restore(folder, self.step.model, self.step.optim, self.extra, self._check)
        self.step.load_state_dict(restored.own["step"])
        notes = [*restored.notes, *self._put_loader(restored)]
        self.restored = restored
        return restored.step, notes

    def _check(self, own: Mapping[str, Any]) -> None:
        self.step.check_state_dict(own["step"])
        if self.loader is not None and own.get("loader") is not None and hasattr(self.loader, "check_state_dict"):
            self.loader.check_state_dict(own["loader"])

    def _put_loader(self, restored: Restored) -> list[str]:
        """Puts the loader, if there is one, where the checkpoint has it."""
        position = restored.own.get("loader")
        if self.loader is None:
            return []
        if position is None:
            return [f"{restored.folder} holds no position in the data: it begins anew"]
        self.loader.load_state_dict(position)
        return []


def _told(problems: list[DamagedError]) -> str:
    return "; ".join(f"{error.given}: {error.why}" for error in problems)
