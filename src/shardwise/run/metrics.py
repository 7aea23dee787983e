"""Metrics of a run as JSON lines and as a picture, its tokens per second, and the time left. Torch-free: launchers use it too."""

import contextlib
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.config.caller import level_of_caller
from shardwise.config.tokenizer import BYTES_MEANT, is_tokens
from shardwise.errors import CheckpointError, ConfigError, UsageError
from shardwise.run.config import RunConfig

FIGURES = frozenset(
    {
        "kind",
        "step",
        "steps",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "data_s",
        "tflops",
        "mfu",
        "comm_bytes",
    }
    | {"seconds_left", "skipped", "num_skipped", "epoch", "loss_scale", "memory", "num_tokens", "perplexity"}
)
"""Names in the rows of steps and validations that are not for entries of the loss."""


def refuse_taken_names(names: Iterable[str]) -> None:
    """Refuses entries of a loss with the name of a figure of the run."""
    taken = next((name for name in names if name in FIGURES), None)
    if taken is not None:
        raise ConfigError(
            f"a loss with an entry {taken!r}",
            why="the log has a figure of the run under that name, and one of the two would be lost",
            fix=f"give the entry another name: 'loss_{taken}'",
        )


class MetricsWriter:
    """Appends metrics to a file, one JSON object per line; a killed process loses no line that it has written.

    Each line goes to the system in one write, so a reader never sees half of one while the run is alive. A line is
    whole or absent: a part of a line that went to a full disk is cut off again, and a file whose last line is
    incomplete is continued on a new line. NaN and infinities, which JSON does not have, are written as the strings
    "nan", "inf" and "-inf". Only one rank writes.

    Args:
        path: the file; missing parent folders are made.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, **fields: Any) -> None:
        """Writes one line: the fields in the order given; values are numbers, strings, None, lists and mappings."""
        if self._file < 0:
            raise UsageError(
                f"write() on the closed metrics file {self.path}",
                why="the writer was closed before",
                fix="write before close(), or open a new MetricsWriter",
            )
        line = json.dumps(_plain(fields), allow_nan=False) + "\n"
        data, before = line.encode(), os.fstat(self._file).st_size
        try:
            while data:  # a full disk may accept a part only, and fails at the next write
                data = data[os.write(self._file, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # the error of the write is the one to report
                os.ftruncate(self._file, before)
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"metrics file {str(self.path)!r}",
            why=f"it cannot be written: {error.strerror or error}",
            fix="give another folder (log.dir=...), or free space and permissions there",
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and arrays, of any number of dims
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_metrics(path: str | Path, *, say: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Reads the file of a :class:`MetricsWriter`; a line that a crash cut off is left out, and reported.

    Args:
        say: called with the message about lines left out; None: it becomes a Python warning.
    """
    rows, torn = [], []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError:  # not JSON, or not text: the writer can leave no other broken line than an incomplete one
            torn.append(number)
    if torn:
        text = f"left out of {path}: line {', '.join(map(str, torn))}, which was cut off"
        if say is None:
            warnings.warn(text, stacklevel=level_of_caller())
        else:
            say(text)
    return rows


def cut_metrics(path: Path, last: int) -> None:
    """Removes the lines of steps after ``last``: a run resumed from there writes them again. The file is replaced
    atomically."""
    if not path.exists():
        return
    rows = [row for row in read_metrics(path, say=lambda text: None) if row.get("step", 0) <= last]
    new = path.with_name(f".{path.name}.new")
    new.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    os.replace(new, path)


class Pace:
    """Tokens per second and time left, measured over the last steps and not the whole run, so that a slow start is
    forgotten.

    Args:
        span: number of last steps to measure over.
        clock: returns seconds, and never goes back.
    """

    def __init__(
        self, num_steps: int, *, done: int = 0, span: int = 50, clock: Callable[[], float] = time.perf_counter
    ):
        self.num_steps, self._clock = num_steps, clock
        self._marks: deque[tuple[float, int, int]] = deque([(clock(), done, 0)], maxlen=span + 1)

    def step(self, step: int, num_tokens: int) -> None:
        """Records that optimizer step number ``step`` (from 1) is done. ``num_tokens``: those of all ranks in the
        step."""
        self._marks.append((self._clock(), step, self._marks[-1][2] + num_tokens))

    def pause(self) -> None:
        """Excludes the time since the last step (a validation): the next steps are measured from now."""
        last = self._marks[-1]
        idle = self._clock() - last[0]
        moved = [(when + idle, step, tokens) for when, step, tokens in self._marks]
        self._marks.clear()
        self._marks.extend(moved)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks; 0.0 before the first step."""
        seconds, _, tokens = self._since()
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps per second; 0.0 before the first."""
        seconds, steps, _ = self._since()
        return steps / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last step; None before the first."""
        seconds, steps, _ = self._since()
        return seconds / steps * (self.num_steps - self._marks[-1][1]) if steps else None

    def _since(self) -> tuple[float, int, int]:
        first, last = self._marks[0], self._marks[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]


# ---- the picture -----------------------------------------------------------------------------------------------------


Curve = Sequence[tuple[float, float]]


def plot_losses(curves: Mapping[str, Curve], path: str | Path, *, title: str, unit: str = "nats/token") -> str | None:
    """Draws one line per curve and writes the picture to ``path`` (.png or .svg by its suffix).

    Args:
        curves: name -> points (step, loss). Points that are not finite leave a gap. Curves of up to 20 points get
            markers.
        path: the picture; its folder must exist.
        unit: of the loss, on the vertical axis.

    Returns:
        None if the picture was written; else one line for the user that says why not: a missing drawing library must
        not end a run.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: matplotlib is not installed ({error}); pip install 'shardwise[plot]'"
    # A figure without pyplot: no window system, and no state shared with the user's figures.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        steps = [step for step, _ in points]
        losses = [loss if math.isfinite(loss) else math.nan for _, loss in points]
        few = len(points) <= 20
        axes.plot(steps, losses, label=name, marker="o" if few else None, linewidth=2.0 if few else 1.0)
    axes.set(title=title, xlabel="optimizer step", ylabel=f"loss ({unit})")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend()
    try:
        figure.savefig(Path(path), dpi=130)
    except OSError as error:
        return f"no picture: {path} cannot be written: {error.strerror or error}"
    return None


# ---- the unit of the loss --------------------------------------------------------------------------------------------


def unit_of(config: RunConfig) -> str:
    data = config.data
    if config.train.loss is not None:
        return "per item counted"
    if data.build is not None:
        return "nats/label"
    return "nats/token" if is_tokens(data.path) or data.tokenizer not in (None, BYTES_MEANT) else "nats/byte"


def perplexity_of(config: RunConfig, loss: float) -> float | None:
    """The perplexity for a loss per token, ``exp(loss)``; None for another loss."""
    if unit_of(config) != "nats/token":
        return None
    return math.exp(loss) if loss < 700 else math.inf
