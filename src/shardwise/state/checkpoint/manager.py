"""``CheckpointManager``: saves a run's checkpoints in one directory, removes old ones, and resumes from the newest."""

import contextlib
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardwise.config.keywords import public_call
from shardwise.errors import ConfigError, Stopped
from shardwise.parallel import runtime_of
from shardwise.state.checkpoint.contents import check_texts
from shardwise.state.checkpoint.directory import Directory
from shardwise.state.checkpoint.extra_objects import check_extra
from shardwise.state.checkpoint.resume import ResumePoint, Step, check_step
from shardwise.state.checkpoint.retention import RetentionPolicy, checked_metrics, figures_of
from shardwise.state.checkpoint.saves import Saves, warn
from shardwise.state.left_base import frozen_names

_SAVES = {
    **dict.fromkeys(
        ("*", "model", "optim", "optimizer", "step", "path", "root"),
        "leave it out: save() saves the model, optimizer and step that the manager was made with, in its directory; "
        "figures: save(metrics={'val_loss': 0.25})",
    ),
    "best": "CheckpointManager(root, step, best='val_loss'), and the figure here: metrics={'val_loss': 0.25}",
}


class CheckpointManager:
    """Saves and resumes the checkpoints of a run: model, optimizer, scheduler, counts, loader position, random streams.
    All ranks must build it, and make the same calls on it.

    A save is complete or absent: a kill at any moment, a full disk or a faulty rank leaves earlier checkpoints as they
    were. What is read is compared with checksums, and nothing is ever unpickled. A checkpoint of any layout loads under
    any layout.

    A run that is asked to stop saves first: by SIGTERM, SIGUSR1 or SIGHUP on any rank, :meth:`stop`, or
    ``stop_after_s``. All ranks agree at the beginning of the next window; the :meth:`save_every` after it saves and
    raises :class:`~shardwise.Stopped`, which ends the program with exit status 75. With ``sigusr1="save"``, SIGUSR1
    saves in the same way and the run continues, as with :meth:`save_soon`. Signals for which the program has its own
    handler are left to it.

    Attributes:
        says_stop: whether rank 0 prints on stderr that the run has stopped, and at which checkpoint.
        root: the directory on rank 0, with links resolved.
        step: as given.
        extra: as given.

    Args:
        root: the directory; it is made. Rank 0's path is used, and every rank must see it.
        step: the :class:`~shardwise.TrainStep`; its model, optimizer, scheduler, scaler and counts are saved. For your
            own loop, an object with ``model``, ``optim``, ``state_dict()``, ``load_state_dict(state)`` and
            ``check_state_dict(state)``, which raises what loading would raise.
        keep: how many of the last checkpoints are kept; None: all.
        keep_every: also keep those whose step is a multiple of it.
        best: also keep the one with the smallest value of this metric (``"loss"``, or a name in ``StepOutput.metrics``
            or in ``save(metrics=...)``); ``"-accuracy"``: with the largest.
        extra: name -> object with ``state_dict`` and ``load_state_dict`` (numbers, texts, lists, dicts and tensors;
            equal on every rank), or a further sharded model, such as a moving average.
        async_save: True: a save copies the run's state and returns; it is written while training continues. An error is
            raised by the next save, by :meth:`wait` or at the end.
        texts: further files to write into every checkpoint: path -> content.
        stop_after_s: seconds from now after which the run is asked to stop; the current window and the save add to it.
        sigusr1: what SIGUSR1 asks for: "stop", or "save": a checkpoint, after which the run continues.
        frozen: "save": frozen weights are in each checkpoint. "leave": they are not; a checkpoint names the directory that they were loaded
            from, and has a digest of each. To resume, load them first: another base is an error. A frozen weight that does not have the value
            that the directory gave is refused.

    Raises:
        CheckpointError: the directory cannot be used, or another run is using it.
        ConfigError: invalid options, or ``extra`` objects that could not be saved.

    Example:
        >>> with sw.CheckpointManager("runs/a", step, keep=3) as ckpt:  # doctest: +SKIP
        ...     for window in ckpt.resume(loader):
        ...         ckpt.save_every(100, step(window))
    """

    says_stop = True

    @public_call(
        {
            **dict.fromkeys(
                ("model", "optim", "optimizer", "optimizers"),
                "leave it out: the step has its model and its optimizer, CheckpointManager(root, step); a second optimizer: extra={'second': second}",
            ),
            "metric": "best=",
            "monitor": "best=",
        }
    )
    def __init__(
        self,
        root: str | os.PathLike[str],
        step: Step,
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: str | None = None,
        extra: Mapping[str, Any] | None = None,
        async_save: bool = True,
        texts: Mapping[str, str] | None = None,
        stop_after_s: float | None = None,
        sigusr1: str = "stop",
        frozen: str = "save",
    ):
        check_extra(extra or {})
        check_step(step)
        check_texts(texts or {})
        _check_stop(stop_after_s, sigusr1)
        self._runtime = runtime_of(step.model)
        if frozen not in ("save", "leave"):
            raise ConfigError(f"frozen={frozen!r}", why="there is no such choice", fix='use "save" or "leave"')
        if frozen == "leave":
            frozen_names(self._runtime)  # raises where there are none
        self._world = self._runtime.world
        self._retention = RetentionPolicy(last=keep, every=keep_every, best=best)
        self._directory = Directory(self._world, Path(root))
        self.root, self.step, self.extra = self._directory.root, step, dict(extra or {})
        self._resume_point = ResumePoint(self._directory, step, self.extra)
        warn(self._world, [self._directory.note] if self._directory.note is not None else [])
        self._saves = Saves(
            self,
            self._directory,
            self._resume_point,
            self._retention,
            texts or {},
            in_background=async_save,
            leaves_frozen=frozen == "leave",
        )
        weakref.finalize(self, self._saves.report_lost)
        self._until_closed = contextlib.ExitStack()
        self._until_closed.enter_context(
            self._world.stop.handle_stop_signals(stop_after_s, usr1_saves=sigusr1 == "save")
        )
        self._world.before_close.append(weakref.WeakMethod(self.close))

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks may be anywhere: wait for the save that is being written, without communication.
        try:
            problem = self._saves.outcome(self._world.timeout_s)
        finally:
            self._let_go()
        if problem is not None and error is not None:  # the error of the with block is the one to raise
            error.add_note(f"the checkpoint that was being written was not finished: {problem}")

    def close(self) -> None:
        """Waits for the save that is being written, and releases the directory. All ranks must call it; leaving the
        world does so too.

        Raises:
            Stopped: the run was asked to stop after its last window; what was trained since the last save has been
                saved.
        """
        if self._saves.is_closed:
            return
        try:
            self.wait()
            request = self._world.stop
            # Also of requests since the last window began. After this exchange no rank is in an exchange of a
            # background save.
            entry = {"stop": request.entry(goes_on=False)}
            request.agree(self._world.agreement.sum(entry, "closing a checkpoint manager")["stop"])
            reason = request.agreed
            if (reason is not None or request.saves) and not self._runtime.in_window:
                if self._saves.last_step != self._runtime.step:
                    self._saves.save({}, is_asked=True)
                    self.wait()
                if reason is not None:
                    self._stop(reason)
            self._saves.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._saves.let_go()
        self._until_closed.close()
        with contextlib.suppress(ValueError):
            self._world.before_close.remove(weakref.WeakMethod(self.close))
        self._directory.close()

    # ---- saving ----------------------------------------------------------------------------------------------

    @public_call()
    def save_every(
        self, num_steps: int | None, out: Any = None, *, metrics: Mapping[str, float] | None = None
    ) -> Path | None:
        """Saves if the step just done is a multiple of ``num_steps``, if the run was asked to stop, or if a checkpoint
        was asked for (which is on disk when this returns). All ranks must call it after each step.

        Args:
            num_steps: windows between two saves; None: only when asked.
            out: what the step returned; ``best`` uses its loss and metrics. A save that was asked for needs none: it is kept as
                the newest.
            metrics: further figures for ``best``, by name; needed where a checkpoint is saved. A NaN is never the best.

        Returns:
            the checkpoint's path, if there is a new one.

        Raises:
            Stopped: on every rank; the run was asked to stop, and the checkpoint is on disk.
            CheckpointError, ConfigError: as for :meth:`save`.
        """
        if num_steps is not None and (not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1):
            raise ConfigError(f"save_every({num_steps!r})", why="it is a number of steps, 1 or more", fix="use 100")
        figures = {**figures_of(out), **checked_metrics(metrics)}
        reason = self._world.stop.agreed
        self._saves.check_base()  # before hours are trained
        if not figures and num_steps and self._retention.best is not None:
            self._saves.warn_once(
                f"best={self._retention.best!r}, and this save_every({num_steps}) is given no figures: where it saves, they are needed. Pass what the "
                f"step returned, save_every({num_steps}, out), or metrics={{name: value}}"
            )
        if reason is None and not self._world.stop.saves and (num_steps is None or self._runtime.step % num_steps):
            return None
        # A request counts once, even if the save fails.
        is_asked, self._world.stop.saves = self._world.stop.saves, False
        saved = self._saves.save(figures, is_asked=is_asked or reason is not None)
        if is_asked:
            self.wait()  # the one who asked may end the job once there is a new checkpoint
        if reason is not None:
            self._stop(reason)
        return saved

    def _stop(self, reason: str) -> NoReturn:
        self.wait()
        self._world.stop.settle()
        stopped = Stopped(reason, self._runtime.step, str(self._directory.folder(self._runtime.step)))
        if self._world.is_main and self.says_stop:
            print(f"shardwise: {stopped}", file=sys.stderr, flush=True)  # Python prints nothing for a SystemExit
        raise stopped

    def stop(self) -> None:
        """Asks the run to save and stop, as SIGTERM does. One rank is enough; may be called in a signal handler or
        another thread."""
        self._world.stop.ask("a call of stop()")

    def save_soon(self) -> None:
        """Asks for a checkpoint after the next window, as SIGUSR1 does with ``sigusr1="save"``. One rank is enough; may
        be called in a signal handler or another thread."""
        self._world.stop.ask_for_save()

    @public_call(_SAVES)
    def save(self, *, metrics: Mapping[str, float] | None = None) -> Path:
        """Saves a checkpoint now. All ranks must call it, between two windows. It first waits for a save that is still
        being written.

        Args:
            metrics: metrics of this checkpoint, for ``best``.

        Returns:
            where the checkpoint is, or with ``async_save`` will be.

        Raises:
            Stopped: on every rank; the run was asked to stop, and the checkpoint is on disk.
            CheckpointError: on every rank, if one of them cannot write, or (with ``async_save``) the previous save
                could not: earlier checkpoints are as they were, and training can continue.
            ConfigError: ``best`` is not among these metrics. The checkpoint is on disk then, as the newest, and ranked by nothing. Or
                ``frozen="leave"``, and a frozen weight is in no directory; nothing is written.
            UsageError: it is called in the middle of a window, or after the manager was closed.
            UnsupportedError: some state is neither JSON nor a tensor; with its name.
        """
        reason = self._world.stop.agreed
        saved = self._saves.save(checked_metrics(metrics), is_asked=reason is not None)
        if reason is not None:
            self._stop(reason)
        return saved

    def wait(self) -> None:
        """Waits for the save that is being written, and raises its error. All ranks must call it."""
        self._saves.wait()

    # ---- loading ---------------------------------------------------------------------------------------------

    @public_call({"loader": "for window in manager.resume(loader): ...; without a sw.Loader: manager.load()"})
    def resume(self, loader: Iterable[Any], *, override: Sequence[str] = ()) -> Iterator[Any]:
        """Restores the newest good checkpoint, if there is one; returns an iterator over the windows of ``loader`` from
        there (or from the beginning). All ranks must call it; each call runs to the end of an epoch, as iterating over
        the loader does.

        Args:
            loader: the run's data loader; its position is saved from here on.
            override: names of settings (``"lr"``, ``"weight_decay"``, ``"T_max"``) for which the program's value takes
                effect where it differs from that of the saved run. With a scheduler, the learning rate is the one that
                the program's schedule has at this step.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be read.
            ConfigError: the loader has no position to save; or settings of the optimizer, the scheduler or the scaler
                differ from those of the saved run and are not in ``override``. Nothing of the run has changed then.
        """
        if self._resume_point.loader is None:  # the first epoch: a checkpoint may be loaded
            self.wait()
        warn(self._world, self._resume_point.take(loader, override))
        return iter(loader)

    @public_call(
        dict.fromkeys(("path", "root"), "CheckpointManager(root, step).load(): the directory is given to the manager")
    )
    def load(self, step: int | None = None, *, override: Sequence[str] = ()) -> int | None:
        """Restores the run from a checkpoint. All ranks must call it.

        Args:
            step: of the checkpoint; None: the newest good one; those that cannot be read are skipped with a warning.
            override: as for :meth:`resume`.

        Returns:
            number of windows trained before it; None if there is no checkpoint.

        Raises:
            CheckpointError: on every rank; none can be read, or the one named cannot, or it is of another model.
                Nothing of the run has changed then.
            ConfigError: settings differ from those of the saved run, as for :meth:`resume`.
        """
        if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
            raise ConfigError(
                f"load({step!r:.60})",
                why="it takes the step of a checkpoint in the manager's directory",
                fix="load(), or load(step=100)",
            )
        self.wait()
        back = self._resume_point
        loaded, notes = back.load_newest(override) if step is None else back.load(step, override)
        warn(self._world, notes)
        return loaded


def _check_stop(stop_after_s: float | None, sigusr1: str) -> None:
    is_number = isinstance(stop_after_s, int | float) and not isinstance(stop_after_s, bool)
    if stop_after_s is not None and not (is_number and stop_after_s > 0):
        raise ConfigError(
            f"stop_after_s={stop_after_s!r}",
            why="it is a number of seconds above 0",
            fix="use 3600, or None for no limit",
        )
    if sigusr1 not in ("stop", "save"):
        raise ConfigError(f"sigusr1={sigusr1!r}", why="there is no such choice", fix='use "stop" or "save"')
