"""``CheckpointManager``: saves a run's checkpoints in one directory, removes old ones, and resumes from the newest."""

import contextlib
import functools
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.errors import ConfigError, Stopped, UsageError
from shardwise.parallel import runtime_of
from shardwise.state.checkpoint.background import Background
from shardwise.state.checkpoint.commit import write_checkpoint
from shardwise.state.checkpoint.contents import Contents, check_texts, contents_of
from shardwise.state.checkpoint.directory import Directory
from shardwise.state.checkpoint.extra_objects import check_extra
from shardwise.state.checkpoint.fault_points import at_fault_point
from shardwise.state.checkpoint.resume import ResumePoint, Step, check_step
from shardwise.state.checkpoint.retention import RetentionPolicy
from shardwise.world.collectively import Peers

_SAVED = "leave it out: save() saves the model, optimizer and step that the manager was made with, in its directory"
_SAVES = {
    **dict.fromkeys(
        ("*", "model", "optim", "optimizer", "step", "path", "root"),
        _SAVED + "; figures: save(metrics={'val_loss': 0.25})",
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
    ):
        check_extra(extra or {})
        check_step(step)
        check_texts(texts or {})
        _check_limit(stop_after_s)
        _check_sigusr1(sigusr1)
        self._runtime = runtime_of(step.model)
        self._world = self._runtime.world
        self._retention = RetentionPolicy(last=keep, every=keep_every, best=best)
        self._texts = {path: text.encode() for path, text in (texts or {}).items()}
        self._saved_step: int | None = None
        self._said: set[str] = set()  # notes that are given once
        self._late_notes: list[str] = []  # notes of the writer thread, shown by the next call
        self._directory = Directory(self._world, Path(root))
        self._resume_point = ResumePoint(self._directory, step, extra or {})
        self._warn([self._directory.note] if self._directory.note is not None else [])
        self._background = Background(self._world) if async_save else None
        if self._background is not None:
            weakref.finalize(self, self._background.tell)
        self._is_closed = False
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
            problem = self._background.outcome(self._world.timeout_s) if self._background is not None else None
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
        if self._is_closed:
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
                if self._saved_step != self._runtime.step:
                    self._save({}, is_asked=True)
                    self.wait()
                if reason is not None:
                    self._stop(reason)
            if self._background is not None:
                self._background.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._is_closed = True
        self._until_closed.close()
        with contextlib.suppress(ValueError):
            self._world.before_close.remove(weakref.WeakMethod(self.close))
        if self._background is not None:
            self._background.let_go()
        self._directory.close()

    @property
    def root(self) -> Path:
        return self._directory.root

    @property
    def step(self) -> Step:
        return self._resume_point.step

    @property
    def extra(self) -> Mapping[str, Any]:
        return self._resume_point.extra

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
        figures = {**_figures_of(out), **_checked(metrics)}
        reason = self._world.stop.agreed
        if not figures and num_steps and self._retention.best is not None:
            self._warn_once(
                f"best={self._retention.best!r}, and this save_every({num_steps}) is given no figures: where it saves, they are needed. Pass what the "
                f"step returned, save_every({num_steps}, out), or metrics={{name: value}}"
            )
        if reason is None and not self._world.stop.saves and (num_steps is None or self._runtime.step % num_steps):
            return None
        # A request counts once, even if the save fails.
        is_asked, self._world.stop.saves = self._world.stop.saves, False
        saved = self._save(figures, is_asked=is_asked or reason is not None)
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
            ConfigError: ``best`` is not among these metrics. The checkpoint is on disk then, as the newest, and ranked by nothing.
            UsageError: it is called in the middle of a window, or after the manager was closed.
            UnsupportedError: some state is neither JSON nor a tensor; with its name.
        """
        reason = self._world.stop.agreed
        saved = self._save(_checked(metrics), is_asked=reason is not None)
        if reason is not None:
            self._stop(reason)
        return saved

    def _save(self, metrics: Mapping[str, float], *, is_asked: bool) -> Path:
        if self._is_closed:
            raise UsageError(
                f"a checkpoint in {self.root} after its manager was closed",
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
            figure = self._figure(metrics, is_asked=is_asked)
        except ConfigError as error:  # on all ranks; what was trained is saved first
            fault = error
        if figure is not None and figure != figure:
            self._warn_once(f"best={self._retention.best!r}: a NaN, at step {self._runtime.step}, is never the best")
        contents = contents_of(
            self.step.model,
            self.step.optim,
            own=lambda: {
                "step": self.step.state_dict(),
                "loader": self._resume_point.position(),
                "given": self._resume_point.given_state(),
                "figure": figure,
                "best": self._retention.best,
                "time": _now(),
            },
            extra=self.extra,
            texts=self._texts,
            of_rank=self._resume_point.dataset_states,
        )
        going_on = self._resume_point.restored is not None or self._saved_step is not None
        self._directory.refuse_behind(contents.step, going_on, self._resume_point.left_behind)
        self._warn([*contents.notes, *self._resume_point.notes])
        self._resume_point.notes.clear()
        write = functools.partial(self._write, figure)
        if self._background is None:
            write(self._world, contents)
        else:
            self._background.begin(contents, write)
        self._saved_step, self._world.stop.saves = contents.step, False
        if fault is not None:
            self.wait()
            fault.add_note(
                f"the checkpoint of step {contents.step} is on disk, as the newest: a run can be resumed from it"
            )
            raise fault
        return self._directory.folder(contents.step)

    def _figure(self, metrics: Mapping[str, float], *, is_asked: bool) -> float | None:
        """The figure of a checkpoint, the same on all ranks, or an error on all of them."""
        if self._retention.best is None:
            return None
        figure, error = None, None
        try:
            figure = self._retention.figure(metrics, is_asked=is_asked)
        except ConfigError as found:
            error = found
        told = self._world.agreement.gather((repr(figure), error), "a checkpoint, comparing figures")
        if error is None:
            error = next((each for _, each in told if each is not None), None)
        if error is not None:
            raise error
        if len({text for text, _ in told}) > 1:
            name = self._retention.best.removeprefix("-")
            raise ConfigError(
                f"best={self._retention.best!r} and a save whose {name} differs between ranks",
                why=f"by rank it is {', '.join(text for text, _ in told)}: ranks would keep other checkpoints as the best",
                fix=f'give what all ranks share, such as a mean over them: save(metrics={{{name!r}: sw.evaluate(model, loader)["loss"]}})',
            )
        return figure

    def wait(self) -> None:
        """Waits for the save that is being written, and raises its error. All ranks must call it."""
        try:
            if self._background is not None:
                self._background.wait()
        except BaseException:
            self._saved_step = None if self._saved_step is None else -1  # the last trained step is not saved
            raise
        notes, self._late_notes = self._late_notes, []
        self._warn(notes)

    def _write(self, figure: float | None, peers: Peers, contents: Contents) -> Path:
        runtime, world = self._runtime, self._world
        dest = write_checkpoint(peers, self.root, contents, str(world.layout), runtime.recipe.fingerprint)
        if peers.is_main:
            self._prune(contents.step, figure)
        return dest

    def _prune(self, newest: int, figure: float | None) -> None:
        """Removes old checkpoints; on rank 0, when the newest is on disk. An error here does not make the save fail:
        the next call reports it."""
        at_fault_point("pruning")
        try:
            self._directory.put_aside(newest, self._resume_point.left_behind)
            self._directory.prune(self._retention, newest, figure)
        except OSError as error:
            self._late_notes.append(f"older checkpoints in {self.root} were not removed: {error}")
        at_fault_point("pruned")

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
        self._warn(self._resume_point.take(loader, override))
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
        self._warn(notes)
        return loaded

    def _warn_once(self, note: str) -> None:
        kind = note.partition(",")[0]
        self._warn([] if kind in self._said else [note])
        self._said.add(kind)

    def _warn(self, notes: Iterable[str]) -> None:
        for note in notes if self._world.is_main else ():
            warnings.warn(note, stacklevel=level_of_caller())


def _figures_of(out: Any) -> dict[str, float]:
    """What a step returned, by name."""
    if out is None:
        return {}
    if not hasattr(out, "loss") or not isinstance(getattr(out, "metrics", None), Mapping):
        raise ConfigError(
            f"save_every(n, {out!r:.60})",
            why="the second argument is what the step returned, of which loss and metrics are taken",
            fix="out = step(window); manager.save_every(100, out); a figure of your own: save_every(100, metrics={'loss': value})",
        )
    return {"loss": out.loss, **out.metrics}


def _checked(metrics: Any) -> Mapping[str, float]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={metrics!r:.60} of a checkpoint",
            why="it maps names of figures to numbers",
            fix="metrics={'val_loss': 0.25}",
        )
    return metrics or {}


def _check_limit(stop_after_s: float | None) -> None:
    is_number = isinstance(stop_after_s, int | float) and not isinstance(stop_after_s, bool)
    if stop_after_s is not None and not (is_number and stop_after_s > 0):
        raise ConfigError(
            f"stop_after_s={stop_after_s!r}",
            why="it is a number of seconds above 0",
            fix="use 3600, or None for no limit",
        )


def _check_sigusr1(sigusr1: str) -> None:
    if sigusr1 not in ("stop", "save"):
        raise ConfigError(f"sigusr1={sigusr1!r}", why="there is no such choice", fix='use "stop" or "save"')


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
