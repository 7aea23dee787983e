"""The saves of a run: each is taken down between two windows, and written at once, or in a thread while training continues."""

import contextlib
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shardwise.config.caller import level_of_caller
from shardwise.errors import ConfigError, ShardwiseError, UsageError
from shardwise.parallel import runtime_of
from shardwise.state.checkpoint.commit import write_checkpoint
from shardwise.state.checkpoint.contents import Contents, contents_of
from shardwise.state.checkpoint.directory import Directory, OwnDirectories
from shardwise.state.checkpoint.fault_points import at_fault_point
from shardwise.state.checkpoint.resume import ResumePoint
from shardwise.state.checkpoint.retention import RetentionPolicy
from shardwise.state.checkpoint.writer import memory_in_line
from shardwise.state.left_base import refuse_lost_base
from shardwise.world import World
from shardwise.world.collectively import Peers
from shardwise.world.side_group import SideGroup


class Saves:
    """Saves one checkpoint at a time. All ranks must make it, and call :meth:`save`, :meth:`wait` and :meth:`close` in
    the same way.

    Args:
        manager: what it saves for; kept alive while a thread writes, so that leaving the world finds it.
        resume_point: what of the run is saved beside the model.
        in_background: whether a thread writes them.
        leaves_frozen: frozen weights are left out.

    Attributes:
        last_step: of the last save; None: there was none; -1: it failed.
    """

    def __init__(
        self,
        manager: object,
        directory: Directory,
        resume_point: ResumePoint,
        retention: RetentionPolicy,
        texts: Mapping[str, str],
        *,
        in_background: bool,
        leaves_frozen: bool = False,
    ):
        self._manager = weakref.ref(manager)
        self._runtime = runtime_of(resume_point.step.model)
        self._world = self._runtime.world
        self._directory, self._resume_point, self._retention = directory, resume_point, retention
        self._texts = {path: text.encode() for path, text in texts.items()}
        self._leaves_frozen, self._base_seen = leaves_frozen, False
        self.last_step: int | None = None
        self.is_closed = False
        self._late_notes: list[str] = []  # of the writer thread, shown by the next call
        self._said: set[str] = set()  # notes that are given once
        self._side_group = SideGroup(self._world) if in_background else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-save")
        self._buffers: dict[str, Tensor] = {}
        self._under_way: Future[Path] | None = None

    def save(self, metrics: Mapping[str, float], *, is_asked: bool) -> Path:
        """Saves a checkpoint; returns where it is, or will be. ``metrics``, ``is_asked``: as for
        :meth:`RetentionPolicy.figure`."""
        if self.is_closed:
            raise UsageError(
                f"a checkpoint in {self._directory.root} after its manager was closed",
                why="the directory was given back, and another run may be using it",
                fix="save inside the `with` block, or make another manager",
            )
        self._world.refuse_imagined("a checkpoint")
        self.wait()
        if self._runtime.in_window:
            raise UsageError(
                "a checkpoint in the middle of a window",
                why="its gradients are half summed, and a resumed run would begin the window again",
                fix="save after the step",
            )
        figure, fault = None, None
        try:
            figure = self._retention.agreed_figure(self._world, metrics, is_asked=is_asked)
        except ConfigError as error:  # on all ranks; what was trained is saved first
            fault = error
        if figure is not None and figure != figure:
            self.warn_once(f"best={self._retention.best!r}: a NaN, at step {self._runtime.step}, is never the best")
        self._warn_of_former_best()
        run = self._resume_point
        self.check_base(again=True)
        contents = contents_of(
            run.step.model,
            run.step.optim,
            own=lambda: {
                "step": run.step.state_dict(),
                "loader": run.position(),
                "given": run.given_state(),
                "figure": figure,
                "best": self._retention.best,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            extra=run.extra,
            texts=self._texts,
            of_rank=run.dataset_states,
            leaves_frozen=self._leaves_frozen,
        )
        own = self._runtime.memory(OwnDirectories)
        self._directory.refuse_behind(contents.step, self._directory.root in own, run.left_behind)
        own.add(self._directory.root)
        warn(self._world, [*contents.notes, *run.notes])
        run.notes.clear()
        self._begin(contents, figure)
        self.last_step, self._world.stop.saves = contents.step, False
        if fault is not None:
            self.wait()
            fault.add_note(
                f"the checkpoint of step {contents.step} is on disk, as the newest: a run can be resumed from it"
            )
            raise fault
        return self._directory.folder(contents.step)

    def _warn_of_former_best(self) -> None:
        """Says at the first save which checkpoints stay since they were the best by another rule."""
        former: Mapping[str, int] = {}
        if self.last_step is None and self._world.is_main:
            with contextlib.suppress(OSError):  # what cannot be read is reported where it is pruned
                former = self._retention.former_best(self._directory.root)
        for rule, step in former.items():
            self.warn_once(
                f"the checkpoint of step {step}, which was the best by best={rule!r}, stays: now it is best={self._retention.best!r}, and it has "
                "no such figure. Delete its directory when it is not needed"
            )

    def check_base(self, *, again: bool = False) -> None:
        """Refuses frozen weights that are left out and are nowhere else; once, or ``again``. All ranks must call it."""
        if self._leaves_frozen and (again or not self._base_seen):
            refuse_lost_base(self._runtime, self._directory.root)
            self._base_seen = True

    def _begin(self, contents: Contents, figure: float | None) -> None:
        """Writes a checkpoint; with a thread it copies what is to be saved, starts the thread, and returns."""
        if self._side_group is None:
            self._write(figure, self._world, contents)
            return
        staged = contents.staged(self._stage)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        self._under_way = self._thread.submit(self._write, figure, self._side_group, staged, self._manager())

    def _stage(self, name: str, tensor: Tensor, offset: Callable[[], int]) -> Tensor:
        """Copies ``tensor`` into a buffer that the next save uses again."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            if tensor.device.type == "cuda":  # pinned memory is page-aligned
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            else:
                buffer = memory_in_line(tensor, offset())
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _write(self, figure: float | None, peers: Peers, contents: Contents, _manager: object = None) -> Path:
        root, recipe = self._directory.root, self._runtime.recipe
        dest = write_checkpoint(peers, root, contents, str(self._world.layout), recipe.fingerprint)
        if peers.is_main:
            self._prune(contents.step, figure)
        return dest

    def _prune(self, newest: int, figure: float | None) -> None:
        """Removes old checkpoints; on rank 0, when the newest is on disk. An error here does not make the save fail:
        the next call reports it."""
        at_fault_point("pruning")
        try:
            self._directory.prune(self._retention, newest, figure, self._resume_point.left_behind)
        except OSError as error:
            self._late_notes.append(f"older checkpoints in {self._directory.root} were not removed: {error}")
        at_fault_point("pruned")

    def wait(self) -> None:
        """Waits for the save that is being written, and raises its error. All ranks must call it."""
        try:
            under_way, self._under_way = self._under_way, None
            error = under_way.exception() if under_way is not None else None
            if isinstance(error, ShardwiseError):  # it says what happened: without the lines of the thread
                error.add_note(
                    "The save that was written beside training has failed, and the run stops here unless this error is caught: checkpoints from "
                    "before are as they were, and the same command goes on from the newest."
                )
                raise error.with_traceback(None) from None
            if error is not None:
                raise error
        except BaseException:
            self.last_step = None if self.last_step is None else -1  # the last trained step is not saved
            raise
        notes, self._late_notes = self._late_notes, []
        warn(self._world, notes)

    def outcome(self, timeout_s: float) -> BaseException | None:
        """Waits for the save that is being written, and returns its error or None. No communication."""
        under_way, self._under_way = self._under_way, None
        try:
            return under_way.exception(timeout=timeout_s) if under_way is not None else None
        except TimeoutError as late:
            return late

    def close(self) -> None:
        """Destroys the process group of the saves, once no rank is in an exchange of it."""
        if self._side_group is not None:
            self._side_group.close()

    def let_go(self) -> None:
        """Frees this rank's thread and buffers; no new save can begin."""
        self.is_closed = True
        self._thread.shutdown(wait=False)
        self._buffers.clear()

    def report_lost(self) -> None:
        """Prints the error of the last save, if any. For a manager that is not closed, so that the error is not
        lost."""
        if self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None:
            print(f"shardwise: the last checkpoint was not written: {self._under_way.exception()}", file=sys.stderr)

    def warn_once(self, note: str) -> None:
        kind = note.partition(",")[0]
        warn(self._world, [] if kind in self._said else [note])
        self._said.add(kind)


def warn(world: World, notes: Iterable[str]) -> None:
    """Warns on rank 0, at the user's line."""
    for note in notes if world.is_main else ():
        warnings.warn(note, stacklevel=level_of_caller())
