"""The folder of a run, as used by the process that shows the run: locked, released, and its files listed."""

import contextlib
import glob
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.errors import CheckpointError, Stopped
from shardwise.launch.imports import import_frozen
from shardwise.launch.lock import release, try_lock
from shardwise.launch.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from shardwise.cli.resume_command import Command
    from shardwise.cli.train_display import Display
    from shardwise.run.config import RunConfig


Stamp = dict[Path, tuple[int, int]]


class RunFolder:
    """The folder of a run, locked for this process inside ``with``; a process that is killed releases it.

    The run's own files are written by rank 0, once it is certain that there will be a run. A run that ends before
    leaves the folder as it was: what locking it made is removed again. One that ends early says what is kept, and by which
    command it resumes. One that a signal ended where it had nothing to save (it was loading, or writing its weights) is
    :class:`~shardwise.errors.Stopped` all the same if a checkpoint of it is there, so that it is started again.

    Raises:
        CheckpointError: the folder cannot be made or written, or another run is writing there.
        ConfigError: its disk has too little space.
    """

    def __init__(self, config: "RunConfig", display: "Display", command: "Command"):
        self.config, self.display, self.command = config, display, command
        self.path = Path(config.log.dir)
        self.metrics = self.path / "metrics.jsonl"
        export = config.checkpoint.export
        self.weights = None if export is None else self.path / export
        self._made: list[Path] = []
        self._held: TextIO | None = None

    def __enter__(self) -> "RunFolder":
        from shardwise.run.disk_space import check_folders, check_space

        check_folders(self.config, self.config.parallel.lora is not None)
        check_space(self.config)
        lock = self.path / ".lock"
        missing = [place for place in (lock, self.path, *self.path.parents) if not place.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._held = _hold(lock, self.display)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"log.dir={self.config.log.dir!r}",
                why=f"it cannot be written: {error}",
                fix="name another folder: --log.dir=PATH",
            ) from error
        self._made = missing
        self._clear()
        self._before = _weights_in(self.weights)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        held = self._held
        try:
            if kind is not None:
                self._clear()
                stopped = self._stopped(error)
                if stopped is not None:
                    which = "the same command" if self.command.is_the_same else "the command below"
                    self.display.row("stopped", f"{stopped.reason}; {which} resumes")
                if self.display.began or stopped is not None:
                    rows, notes = self._metrics()
                    done = max([self.display.latest.get("step", 0), *rows])
                    self.display.row("kept", "\n".join(self._kept(done, notes)))
                    self._say_what_resumes(done)
                else:
                    self._leave_no_trace()
                if stopped is not None and stopped is not error:
                    raise stopped from None
        finally:
            if held is not None:
                release(held)

    def _stopped(self, error: BaseException | None) -> Stopped | None:
        """What ``error`` means for a run that was asked to stop, and can be resumed; None: it is another end."""
        if isinstance(error, Stopped):
            return error
        reasons = {128 + number: number.name for number in STOP_SIGNALS}
        newest = self._newest()
        if not isinstance(error, SystemExit) or error.code not in reasons or newest is None:
            return None
        if not self.display.began and not self.config.checkpoint.resume:
            return None  # the checkpoints are those of an older run
        return Stopped(reasons[error.code], int(newest.name.partition("-")[2]), str(newest))

    def draw(self, unit: str) -> str | None:
        """Draws the loss curve; returns None, or a line that says why there is no picture."""
        if not self.config.log.plot:
            return "no picture: log.plot=false"
        from shardwise.run.metrics import plot_losses

        self.display.on_phase("drawing the loss curve")
        try:
            rows = self._rows(lambda text: self.display.row("trouble", text))
        except OSError as error:
            return f"no picture: the metrics are gone: {error.strerror or error}: {self.metrics}"
        curves = {name: _points(rows, kind) for name, kind in (("training", "step"), ("validation", "val"))}
        curves = {name: points for name, points in curves.items() if points}
        return plot_losses(curves, self.path / "loss.png", title="shardwise train", unit=unit)

    def files(self, *, picture: bool) -> list[str]:
        """The files of a finished run, a line each. ``picture``: whether it was drawn; if not, an existing one is an
        older run's."""
        from shardwise.run.disk_space import written_folders
        from shardwise.run.older_weights import place_of_older

        notes: dict[Path, str] = {self.metrics: "", self.path / "config.yaml": " (everything resolved)"}
        written = {"csv": "metrics.csv", "tensorboard": "tensorboard", "wandb": "wandb"}
        notes |= {self.path / name: "" for word, name in written.items() if word in self.config.log.to}
        if self.config.train.profile is not None:
            notes[self.path / "profile"] = " (traces for https://ui.perfetto.dev)"
        if picture:
            notes[self.path / "loss.png"] = " (loss curve)"
        words = {
            "export": (self._weights_note(), "weights"),
            "adapter": (" (adapters, in PEFT's files)", "adapters"),
            "base": (" (the base in 4 bits, in bitsandbytes' files)", "base"),
        }
        for key, (folder, _) in written_folders(self.config, self.config.parallel.lora is not None).items():
            note, what = words[key]
            notes |= {folder: note, place_of_older(folder): f" ({what} of the run before)"}
        return [f"{path}{note}" for path, note in notes.items() if path.exists()]

    def _weights_note(self) -> str:
        dtype, kind = self.display.weights_dtype, "weights" if self.config.parallel.lora is None else "merged weights"
        return f" ({kind}, safetensors, {dtype})" if dtype else f" ({kind}, safetensors)"

    def _metrics(self) -> tuple[list[int], list[str]]:
        """The steps in the metrics, and lines that say what is there."""
        notes: list[str] = []
        try:
            steps = [row["step"] for row in self._rows(notes.append) if row["kind"] == "step"]
        except OSError as error:
            return [], [f"no metrics ({self.metrics}: {error.strerror or error})"]
        last = f"up to step {max(steps)}" if steps else "without a step"
        return steps, [f"{self.metrics} (metrics {last})", *notes]

    def _kept(self, done: int, metrics: list[str]) -> list[str]:
        """After a failure or an interruption: the steps that were done, and the files that are left, a line each."""
        steps = self.display.steps or self.config.train.steps  # of epochs: None until they are counted
        lines = [f"{done}{f' of {steps}' if steps else ''} steps were done", *metrics]
        newest = self._newest()
        if newest is not None:
            lines.append(f"{newest} (newest checkpoint)")
        now = _weights_in(self.weights)
        if self.display.weights is not None:
            lines.append(f"{self.display.weights}{self._weights_note()}")
        elif now != self._before and now:  # renamed into place, but not reported yet
            lines.append(f"{self.weights} (weights, safetensors)")
        elif self.weights is not None:
            lines.append(f"no weights{f' (those in {self.weights} are older)' if now else ''}")
        return lines

    def _newest(self) -> Path | None:
        return max(self.path.glob("checkpoints/step-*"), default=None)

    def _say_what_resumes(self, done: int) -> None:
        """Says by which command the run resumes, and at which step; or what would have kept a checkpoint."""
        newest, kept = self._newest(), self.config.checkpoint
        steps = self.display.steps or self.config.train.steps or done
        if newest is None and kept.every is not None and done >= kept.every:
            self.display.row(
                "resume",
                f"not possible, no checkpoint is there: no save after step {kept.every} or later was finished; errors of saves are above",
            )
            return
        if newest is None:
            every = max(1, min(steps // 10, done))
            why = "no checkpoint was asked for" if kept.every is None else f"the first was due after step {kept.every}"
            saved = f" would have kept step {done // every * every}" if done else " keeps some"
            self.display.row(
                "resume", f"not possible, no checkpoint is there: {why}; --checkpoint.every={every}{saved}"
            )
            return
        where = f"continues after step {int(newest.name.partition('-')[2])} of {steps}"
        if self.command.is_of_launcher:
            less = "" if self.command.is_the_same else " without --fresh, or with --checkpoint.resume=true,"
            self.display.row("resume", f"the same command of your launcher{less} {where}")
        else:
            self.display.commands("resume", [(self.command.resuming(), where)])

    def _rows(self, say: Callable[[str], None]) -> list[dict[str, Any]]:
        from shardwise.run.metrics import read_metrics

        return read_metrics(self.metrics, say=say)

    def _clear(self) -> None:
        """Removes incomplete weights and adapters that a killed process left in the folder."""
        from shardwise.run.disk_space import written_folders

        for folder, _ in written_folders(self.config, self.config.parallel.lora is not None).values():
            if self.path in folder.parents and any(folder.parent.glob(f".{glob.escape(folder.name)}.saving-*")):
                import_frozen("shardwise.state.staging").remove_left_overs(folder.parent, folder.name)

    def _leave_no_trace(self) -> None:
        with contextlib.suppress(OSError):  # in use, or removed already
            for place in self._made:
                place.rmdir() if place.is_dir() else place.unlink()


def _hold(lock: Path, display: "Display") -> TextIO:
    tried = try_lock(lock)
    if tried.held is None:
        raise CheckpointError(
            f"log.dir={str(lock.parent)!r}",
            why=f"another run is writing there (process {tried.owner}), and their metrics and weights would mix",
            fix="wait for it, or name another folder: --log.dir=PATH",
        )
    if tried.note is not None:
        display.row("trouble", tried.note)
    return tried.held


def _points(rows: list[dict[str, Any]], kind: str) -> list[tuple[float, float]]:
    return [(row["step"], float(row["loss"])) for row in rows if row["kind"] == kind]


def _weights_in(folder: Path | None) -> Stamp:
    """The weight files in a folder, each with inode and time, which change when it is replaced."""
    stamp: Stamp = {}
    with contextlib.suppress(OSError):
        for file in folder.glob("*.safetensors") if folder is not None else ():
            facts = file.stat()
            stamp[file] = (facts.st_ino, facts.st_mtime_ns)
    return stamp


# ---- what the ranks print --------------------------------------------------------------------------------------------


_MOST_HELD = 10_000  # lines


class RankLogs:
    """``ranks/rank-N.log`` below a run's folder: each line with its time and the name of its stream.

    Nothing is written until :meth:`begin`, so that a run that is refused leaves the folder as it was; lines that came before
    are written then. A line that cannot be written is dropped: the screen has it.
    Files of earlier runs in the folder are continued.
    """

    def __init__(self, folder: Path):
        self._folder = folder / "ranks"
        self._held: list[tuple[int, str]] | None = []
        self._files: dict[int, TextIO] = {}
        self._lock = threading.Lock()

    def write(self, rank: int, stream: str, line: str) -> None:
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {stream}: {line}\n"
        with self._lock:
            if self._held is None:
                self._write(rank, text)
            elif len(self._held) < _MOST_HELD:
                self._held.append((rank, text))

    def begin(self) -> None:
        """Called when the run has begun, with files of its own."""
        with self._lock:
            held, self._held = self._held or [], None
            for rank, text in held:
                self._write(rank, text)

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _write(self, rank: int, text: str) -> None:
        with contextlib.suppress(OSError):
            if rank not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"rank-{rank}.log"
                self._files[rank] = path.open("a", encoding="utf-8", buffering=1)
            self._files[rank].write(text)
