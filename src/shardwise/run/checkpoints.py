"""Checkpoints of ``shardwise train``: whether there is one to resume from, and when the next one is saved."""

import contextlib
import itertools
import os
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.data.loader import Loader
from shardwise.errors import CheckpointError
from shardwise.parallel import runtime_of
from shardwise.run.config import RunConfig
from shardwise.run.resume_check import changes_since, texts_of
from shardwise.state.checkpoint.manager import CheckpointManager
from shardwise.state.integrity.manifest import folder_name, steps_in
from shardwise.state.left_base import FROZEN, refuse_lost_base
from shardwise.step.step import TrainStep
from shardwise.world import World
from shardwise.world.collectively import collectively


class RunCheckpoints:
    """Saves and resumes the checkpoints in ``log.dir``. All ranks must make it and call it in the same way.

    Attributes:
        are_there: whether there is a run to resume.
        changes: settings that differ from that run's, and take effect.
        lack_base: they, or those that the run will save, are without the frozen weights, which are loaded before.
        unsaved: why the last save failed; None if it did not. Equal on every rank.

    Raises:
        ConfigError: on every rank; a setting that differs would have no effect, or makes it another run.
        CheckpointError: older checkpoints cannot be read, or (by :meth:`opened`) cannot be moved aside.
    """

    def __init__(self, config: RunConfig, world: World):
        self.config, self.world = config, world
        self.folder = Path(config.log.dir) / "checkpoints"
        found = collectively(world, "looking for checkpoints", self._look, on_main=True)
        self.are_there: bool
        self.changes: list[str]
        self.lack_base: bool
        self.are_there, self.changes, self.lack_base = world.broadcast(found)
        self.unsaved: CheckpointError | None = None
        self._manager: CheckpointManager | None = None

    def _look(self) -> tuple[bool, list[str], bool]:
        if not self.config.checkpoint.resume or not self._are_some():
            return False, [], False
        lack_base = any((self.folder / folder_name(step) / FROZEN).is_file() for step in steps_in(self.folder))
        lack_base |= self.config.checkpoint.frozen == "leave"
        return True, changes_since(self.folder, self.config), lack_base

    def _are_some(self) -> bool:
        return self.folder.is_dir() and bool(steps_in(self.folder))

    def _move_aside(self) -> None:
        """Moves the checkpoints of an older run aside if this run starts from the beginning. They stay next to their
        real directory: if that is reached by a link to another disk, new checkpoints go there too."""
        if self.config.checkpoint.resume or not self._are_some():
            return
        place = self.folder.resolve()
        names = (place.with_name(f"{place.name}.previous-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        try:
            os.rename(place, aside)
            if self.folder.is_symlink():
                place.mkdir()
                shutil.copymode(aside, place)
        except OSError as error:  # it is a mount point, or its parent belongs to another user
            raise CheckpointError(
                f"the older checkpoints in {place}",
                why=f"they cannot be moved aside, to {aside}: {error.strerror or error}",
                fix="move them away yourself, or name another folder: --log.dir=PATH",
            ) from error

    @contextlib.contextmanager
    def opened(self, step: TrainStep, last: dict[str, Any], emit: Callable[..., None]) -> Iterator[None]:
        """Within, checkpoints are saved, if the run asks for them; afterwards they are complete on disk.

        Args:
            last: latest figures of the run; a resumed run has them from its beginning.
            emit: called for saves that failed: ``emit("trouble", text=...)``.
        """
        kept = self.config.checkpoint
        self._emit = emit
        if not self.are_there:  # before older checkpoints are moved
            self._refuse_lost_base(step)
        collectively(self.world, "moving older checkpoints aside", self._move_aside, on_main=True)
        if not kept.are_made and not self.are_there:
            yield
            return
        kinds = ("loss", "val_loss", "num_skipped")
        figures = types.SimpleNamespace(  # the last ones of the run
            state_dict=lambda: {name: last[name] for name in kinds if name in last}, load_state_dict=last.update
        )
        self._manager = CheckpointManager(
            self.folder,
            step,
            keep=kept.keep,
            keep_every=kept.keep_every,
            extra={"figures": figures},
            async_save=kept.background,
            texts=texts_of(self.config) if self.world.is_main else {},
            stop_after_s=kept.stop_after_s,
            sigusr1=kept.sigusr1,
            frozen=kept.frozen,
        )
        self._manager.says_stop = False  # the process that started the run prints it
        with self._manager:
            yield

    def resume(self, loader: Loader) -> int:
        """Restores the run and the loader from the newest good checkpoint, if there is one; returns the number of steps
        done before. From here on the loader's position is saved."""
        if self._manager is None:
            return 0
        self._manager.resume(loader)
        self._refuse_lost_base(self._manager.step)  # type: ignore[arg-type]  # before anything is trained
        return self._manager.step.num_steps  # type: ignore[attr-defined]

    def _refuse_lost_base(self, step: TrainStep) -> None:
        if self.config.checkpoint.frozen == "leave" and self.config.checkpoint.are_made:
            refuse_lost_base(runtime_of(step.model), self.folder)

    def save(self, done: int, *, is_last: bool = False, is_over: bool = False) -> None:
        """Saves a checkpoint if one is due or asked for, and at the end of the run. A save that fails (a full disk) has
        changed nothing: the run continues, and the next save tries again.

        Args:
            is_last: the run ends with this step, as planned.
            is_over: the run has ended after that step, of which it has called this before.
        """
        if self._manager is None:
            return
        kept, stops = self.config.checkpoint, self.world.stop.agreed is not None
        if is_over and (kept.every is None or (done % kept.every == 0 and self.unsaved is None)):
            return
        is_last = kept.every is not None and (is_over or is_last)
        every = done if is_last else kept.every
        is_asked = self.world.stop.saves
        if not stops and not is_asked and (every is None or done % every):
            return
        self.settle()
        try:
            path = self._manager.save_every(every)
            self.unsaved = None
            if is_asked and path is not None:
                self._emit("saved", text=f"SIGUSR1: a checkpoint of step {done}, {path}")
        except CheckpointError as error:
            if stops:
                raise
            self._failed(error, is_last=is_last, is_only=every is None)

    def settle(self, *, is_over: bool = False) -> None:
        """Waits for the save that is being written, and notes whether it failed. ``is_over``: the run is, and no other
        save follows."""
        if self._manager is not None:
            try:
                self._manager.wait()
            except CheckpointError as error:
                self._failed(error, is_last=is_over)

    def _failed(self, error: CheckpointError, *, is_last: bool, is_only: bool = False) -> None:
        self.unsaved = error
        if not is_last:  # a failure of the last one is in the run's error
            then = "another SIGUSR1 tries again" if is_only else "the next save tries again"
            self._emit("trouble", text=f"{error.given}: {error.why}; training continues, and {then}")
