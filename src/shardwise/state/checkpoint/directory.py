"""The directory of a run's checkpoints: locked by one run at a time, which also removes incomplete and old ones."""

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

from shardwise.config.folders import is_checkpoint, refuse_within_checkpoint
from shardwise.errors import CheckpointError
from shardwise.launch.lock import release, try_lock
from shardwise.state.checkpoint.retention import RetentionPolicy, remove, remove_removed
from shardwise.state.files import writing
from shardwise.state.integrity.manifest import folder_name, steps_in
from shardwise.state.staging import remove_left_overs, sync_folder
from shardwise.world import World
from shardwise.world.collectively import collectively

_ENDING_S = 2.0  # a killed run that is started again at once may find ranks that are still ending


class OwnDirectories(set[Path]):
    """Those in which a model's run has saved a checkpoint, or from which it was resumed, by whichever manager."""


class Directory:
    """The directory of checkpoints: rank 0 makes it, holds its lock and cleans it up; all ranks must open and see it.

    Attributes:
        root: its path on rank 0, with links resolved.
        note: what the user should know about it, on rank 0.

    Raises:
        CheckpointError: on every rank; it cannot be used, it is itself a checkpoint, or another run uses it.
    """

    def __init__(self, world: World, root: Path):
        self._world = world
        self._lock: TextIO | None = None
        self.note: str | None = None
        collectively(world, "opening a checkpoint directory", lambda: self._open(root), on_main=True)
        self.root: Path = world.broadcast(root.resolve())

    def _open(self, root: Path) -> None:
        place = root.resolve()  # also resolves "runs/a/latest"
        if is_checkpoint(place, by_name=True):
            raise CheckpointError(
                f"the directory {root} for checkpoints",
                why=f"it is one checkpoint: {place}",
                fix=f"name the directory that it lies in: {place.parent}",
            )
        refuse_within_checkpoint(place.parent, "checkpoint", f"the directory {root} for checkpoints")
        with writing(f"the directory {root} for checkpoints", "name a directory that can be written"):
            made = [folder for folder in (place, *place.parents) if not folder.exists()]
            place.mkdir(parents=True, exist_ok=True)
            for folder in made:  # unsynced, a power loss could lose the new folders and all in them
                with contextlib.suppress(PermissionError):  # the directory may be writable but not readable
                    sync_folder(folder.parent)
            self._lock, owner, self.note = try_lock(root / ".lock", wait_s=_ENDING_S)
        if self._lock is None:
            raise CheckpointError(
                f"the checkpoints in {root}",
                why=f"another run is using them (process {owner}), and one would prune the other's",
                fix="wait for it, or name another directory",
            )
        remove_left_overs(root)
        remove_removed(root)

    def close(self) -> None:
        """Releases the lock, so that another run can use the directory."""
        if self._lock is not None:
            release(self._lock)
            self._lock = None

    def steps(self) -> list[int]:
        """The steps of its checkpoints, whole or not, oldest first. All ranks must call it."""
        found = collectively(self._world, "looking for checkpoints", lambda: steps_in(self.root), on_main=True)
        return self._world.broadcast(found)

    def folder(self, step: int) -> Path:
        """The path that the checkpoint of that step has, or would have."""
        return self.root / folder_name(step)

    def refuse_behind(self, step: int, going_on: bool, left_behind: Collection[int]) -> None:
        """Refuses to save a checkpoint older than others there, which a later resume would take instead; and to save
        into a directory with checkpoints of an unrelated run, which would be pruned. All ranks must call it.

        Args:
            going_on: whether this run has saved or loaded one of the checkpoints there.
            left_behind: steps of those that could not be read.
        """
        steps = self.steps()
        if steps and not going_on:
            raise CheckpointError(
                f"a checkpoint of step {step} in {self.root}",
                why=f"there are those of an earlier run (step {', '.join(map(str, steps[-3:]))}), from which this one was not resumed",
                fix="go on from them: resume(loader) or load(); or name another directory",
            )
        if any(other > step and other not in left_behind for other in steps):
            raise CheckpointError(
                f"a checkpoint of step {step} in {self.root}",
                why="there are newer ones, of a run that went on from another point: the next resume would take those",
                fix="name another directory, or move the newer ones away",
            )

    def prune(self, retention: RetentionPolicy, newest: int, figure: float | None, left_behind: Sequence[int]) -> None:
        """Renames checkpoints newer than step ``newest`` that could not be read (``left_behind``), so that this one counts
        as the newest; removes those that ``retention`` does not keep."""
        for other in left_behind:
            folder = self.folder(other)
            if other > newest and folder.exists():
                os.replace(folder, folder.with_name(f"damaged-{folder.name}-{time.time_ns():x}"))
        for step in retention.steps_to_remove(self.root, newest, figure):
            remove(self.folder(step))
