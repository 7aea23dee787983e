"""The directory of a run's checkpoints: one run at a time has it, and removes what nobody needs."""

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

from shardwise.errors import CheckpointError
from shardwise.launch.lock import release, try_lock
from shardwise.state.checkpoint.retention import RetentionPolicy, remove, remove_removed
from shardwise.state.integrity.manifest import MANIFEST, folder_name, is_manifest, step_of, steps_in
from shardwise.state.staging import remove_left_overs, sync_folder
from shardwise.world import World
from shardwise.world.collectively import collectively

__all__ = ["Directory"]

_ENDING_S = 2.0  # a run that was killed, and is started again at once, finds the last of its ranks still ending


class Directory:
    """Rank 0 makes it, holds its lock and tidies it up; all ranks must open it, and see it.

    Attributes:
        root: its path, without links: rank 0's.
        note: what the user should know of it, on rank 0.

    Args:
        world: of the run.
        root: its path.

    Raises:
        CheckpointError: on every rank; it cannot be used, it is one checkpoint, or another run has it.
    """

    def __init__(self, world: World, root: Path):
        self._world = world
        self._lock: TextIO | None = None
        self.note: str | None = None
        collectively(world, "opening a checkpoint directory", lambda: self._open(root), on_main=True)
        self.root: Path = world.broadcast(root.resolve())

    def _open(self, root: Path) -> None:
        place = root.resolve()  # of "runs/a/latest" too
        if step_of(place) is not None or is_manifest(place / MANIFEST):
            raise CheckpointError(
                f"the directory {root} for checkpoints",
                why=f"it is one checkpoint: {place}",
                fix=f"name the directory that it lies in: {place.parent}",
            )
        try:
            made = [folder for folder in (place, *place.parents) if not folder.exists()]
            place.mkdir(parents=True, exist_ok=True)
            for folder in made:  # a loss of power would take the new names, and the checkpoints with them
                with contextlib.suppress(PermissionError):  # a directory that one may write to, and not list
                    sync_folder(folder.parent)
            self._lock, owner, self.note = try_lock(root / ".lock", wait_s=_ENDING_S)
        except OSError as error:
            raise CheckpointError(
                f"the directory {root} for checkpoints",
                why=f"it cannot be used: {error.strerror or error}",
                fix="name a directory that can be written",
            ) from error
        if self._lock is None:
            raise CheckpointError(
                f"the checkpoints in {root}",
                why=f"another run is using them (process {owner}), and one would prune the other's",
                fix="wait for it, or name another directory",
            )
        remove_left_overs(root)
        remove_removed(root)

    def close(self) -> None:
        """From here on another run may have it."""
        if self._lock is not None:
            release(self._lock)
            self._lock = None

    def steps(self) -> list[int]:
        """Of the checkpoints there, whole or not, the oldest first. All ranks must ask."""
        found = collectively(self._world, "looking for checkpoints", lambda: steps_in(self.root), on_main=True)
        return self._world.broadcast(found)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of that step is, or would be."""
        return self.root / folder_name(step)

    def refuse_behind(self, step: int, going_on: bool, left_behind: Collection[int]) -> None:
        """A checkpoint that is older than others there would not be the one that a resumed run takes; and those of a
        run that this one has nothing to do with would be pruned. All ranks must ask.

        Args:
            step: of the checkpoint to be saved.
            going_on: whether this run has saved or loaded one of those there.
            left_behind: steps of those that could not be read.

        Raises:
            CheckpointError: it would be.
        """
        steps = self.steps()
        if steps and not going_on:
            raise CheckpointError(
                f"a checkpoint of step {step} in {self.root}",
                why=f"there are those of an earlier run (step {', '.join(map(str, steps[-3:]))}), which this one has not gone on from",
                fix="go on from them: resume(loader) or load(); or name another directory",
            )
        if any(other > step and other not in left_behind for other in steps):
            raise CheckpointError(
                f"a checkpoint of step {step} in {self.root}",
                why="there are newer ones, of a run that went on from another point: the next resume would take those",
                fix="name another directory, or move the newer ones away",
            )

    def put_aside(self, newest: int, left_behind: Sequence[int]) -> None:
        """Newer checkpoints that could not be read must not stand before this one; they are kept under another name.

        Raises:
            OSError: one cannot be renamed.
        """
        for other in left_behind:
            folder = self.folder(other)
            if other > newest and folder.exists():
                os.replace(folder, folder.with_name(f"damaged-{folder.name}-{time.time_ns():x}"))

    def prune(self, retention: RetentionPolicy, newest: int, figure: float | None) -> None:
        """Removes what need not stay.

        Raises:
            OSError: the directory cannot be read.
        """
        for step in retention.superfluous(self.root, newest, figure):
            remove(self.folder(step))
