"""Shows a training run while it runs: a live bar on a terminal, plain lines elsewhere; never silent for two seconds.

A display receives events (see :mod:`shardwise.run.output`) and lines that ranks wrote. It knows nothing of processes.
On a terminal the last lines are redrawn in place; in a pipe or a log file a thread prints the run's progress whenever
nothing was printed for a while.
"""

import contextlib
import io
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from shardwise.recipe import human_bytes

_QUIET_S = 1.5
_QUIET_LATER_S = 30.0
_EARLY_S = 300.0
_SHOWN_WAIT = 0.1  # of the time of a step
_INDENT = " " * 11
_ROWS = {
    "kept": "tokens",
    "older": "older",
    "adapters": "adapters",
    "vocabulary": "vocab",
    "loaded": "weights",
    "resumed": "resumed",
    "saved": "saved",
    "trouble": "trouble",
}
"""Events that are a text -> the label of their row."""
_SHELL_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


class Display:
    """Shows the events of a training run. A context manager: leaving it restores the terminal.

    Args:
        stream: where to write.
        unit: of the loss ("nats/byte").
        live: redraw in place; None: if ``stream`` is a terminal that can move its cursor.
        clock: returns seconds, and never goes back.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        unit: str = "nats/token",
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stream = stream or sys.stdout or io.StringIO()  # a process may be started with stdout closed
        self.unit, self._clock = unit, clock
        able = self.stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self.live = able if live is None else live
        self.phase = "starting"
        self._far = ""  # how far the phase is
        self.latest: dict[str, Any] = {}
        self.began = False
        self.weights: str | None = None
        self.weights_dtype = ""
        self.steps: int | None = None  # of the run, once they are known
        self._unwritable = self._interrupted = False
        self._state = 0
        self._started = self._spoken = self._phase_since = self._news_since = clock()
        self._lock = threading.RLock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._screen: Any = None

    def __enter__(self) -> "Display":
        if self.live:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self.stream, highlight=False, soft_wrap=True)
            self._screen = Live(
                console=console,
                get_renderable=self._render,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
            )
            self._screen.start()
        else:
            self._thread = threading.Thread(target=self._print_progress, name="shardwise-display", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._screen is not None:
            self._screen.stop()
            self._screen = None
        if self._thread is not None:
            self._thread.join()

    # ---- input -------------------------------------------------------------------------------------------------

    def say(self, text: str = "") -> None:
        """Prints a line that is not redrawn."""
        with self._lock:
            self._spoken = self._clock()
            if self._screen is not None:
                self._screen.console.print(text, markup=False)
            else:
                self._write(text)

    def _write(self, text: str) -> None:
        """Writes a line. A log file on a full disk does not end a run; a reader that is gone (``| head``) does."""
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._unwritable:
                self._unwritable = True
                with contextlib.suppress(OSError):  # stderr may be the same file
                    print(f"the output cannot be written ({error.strerror}); the run continues", file=sys.stderr)

    def row(self, label: str, text: str) -> None:
        """Prints a line with a label; a long text is wrapped below it."""
        width = max(40, min(110, _width(self.stream)) - len(_INDENT))
        lines = [part for line in text.splitlines() for part in _wrapped(line, width)] or [""]
        self.say("\n".join(f"{label if n == 0 else '':<9}  {line}" for n, line in enumerate(lines)))

    def commands(self, label: str, commands: Sequence[tuple[str, str]]) -> None:
        """Prints commands to copy, each with what it shows: next to it, or above it on a narrow terminal."""
        width = max(len(command) for command, _ in commands)
        room = _width(self.stream) - len(_INDENT) if self.stream.isatty() else None
        lines = [f"{command:<{width}}  # {shows}" for command, shows in commands]
        if room is not None and max(map(len, lines)) > room:
            lines = [line for command, shows in commands for line in (f"# {shows}", *_continued(command, room))]
        self.say("\n".join(f"{label if n == 0 else '':<9}  {line}" for n, line in enumerate(lines)))

    def on_phase(self, text: str) -> None:
        """Called when the run enters a new phase, which is shown until the next."""
        known = text in (self.phase, "training", "validating")
        self.phase, self._phase_since, self._news_since, self._far = text, self._clock(), self._clock(), ""
        if not self.live and not known:
            self.say(f"... {text}")

    def on_line(self, rank: int, stream: str, line: str) -> None:
        self.say(f"[rank {rank}] {line}")

    def on_event(self, rank: int, event: dict[str, Any]) -> None:
        """Shows an event of the run; kinds that this display does not know are ignored."""
        fields = {key: value for key, value in event.items() if key != "kind"}
        kind = str(event.get("kind"))
        show = getattr(self, f"_show_{kind}", None)
        if kind in _ROWS:
            self.row(_ROWS[kind], fields["text"])
        elif show is not None:
            show(**fields)

    def _show_phase(self, *, text: str) -> None:
        self.on_phase(text)

    def _show_progress(self, *, text: str) -> None:
        """Shown with the phase and its age; not a line of its own."""
        self._far = f": {text}"

    def _show_interrupted(self) -> None:
        self._interrupted = True
        self.on_phase("Ctrl-C: ending the ranks")

    def _show_asked_to_stop(self, *, signal: str) -> None:
        self.on_phase(
            f"{signal} was sent to the ranks: within the steps they end after this one, with a checkpoint if they keep any"
        )

    def _show_stop(self, *, reason: str) -> None:
        asked = "Ctrl-C" if self._interrupted and reason == "SIGTERM" else reason  # the launcher sends it after Ctrl-C
        self.on_phase(f"{asked}: saving, to stop")

    def _show_ended(self, *, step: int, callback: str) -> None:
        self.row("ended", f"after step {step}, as train.callback={callback} asked")

    def _show_world(self, *, device: str, layout: str, why: str) -> None:
        self.row("device", device)
        self.row("layout", f"{layout}: {why}")

    def _show_data(
        self, *, name: str, train_samples: int | None, val_samples: int, tokens_per_step: int | None, report: str
    ) -> None:
        self.began = True  # from here on this run has files
        self.row(
            "data",
            f"{name}: {'a stream of' if train_samples is None else f'{train_samples:,}'} samples to train on, {val_samples:,} to validate"
            + ("" if tokens_per_step is None else f"; {'at most ' if report else ''}{tokens_per_step:,} tokens a step"),
        )
        if report:
            self.row("records", report)

    def _show_planned(self, *, steps: int, text: str) -> None:
        self.steps = steps
        if text:
            self.row("epochs", text)

    def _show_model(self, *, name: str, num_params: int, units: int, why: str, num_trained: int | None = None) -> None:
        trained = "" if num_trained in (None, num_params) else f", {num_trained:,} of them trained"
        self.row("model", f"{name}, {num_params:,} parameters{trained} in {units} unit{'s' if units > 1 else ''}")
        self.row("engine", why)

    def _show_sample(self, *, when: str, prompt: str, text: str, word_share: float) -> None:
        self.row(when, f"{100 * word_share:.0f}% real words: {prompt}|{_printable(text)}")

    def _show_answer(self, *, when: str, prompt: str, text: str, reference: str) -> None:
        self.row(when, f"{_printable(prompt[-120:])}|{_printable(text)}")
        if when == "after":
            self.row("", f"the record has: {_printable(reference)}")

    def _show_memory(self, *, per_rank: list[int], one_process: int, **_: Any) -> None:
        self._state = max(per_rank)
        share = f"{self._state / max(1, one_process):.0%}"
        self.row(
            "memory",
            f"{human_bytes(self._state)} of parameters, gradients and optimizer state per rank, "
            f"{human_bytes(one_process)} in one process ({share})",
        )

    def _show_chosen(self, *, name: str, text: str) -> None:
        self.row(name, text)

    def _show_step(self, **figures: Any) -> None:
        self.latest, self._news_since = figures, self._clock()
        self.phase = "training"

    def _show_val(self, *, step: int, loss: float, **_: Any) -> None:
        self.say(f"{'':<9}  step {step}: validation loss {loss:.4f} {self.unit}")

    def _show_trace(self, *, path: str) -> None:
        self.row("written", path)

    def _show_weights(self, *, path: str, dtype: str) -> None:
        self.weights, self.weights_dtype = path, dtype  # named in the report

    # ---- drawing -----------------------------------------------------------------------------------------------

    def status(self) -> str:
        """The progress of the run, in one line."""
        if not self.latest or self.phase != "training":
            return f"{self.phase}{self._far} ({self._clock() - self._phase_since:.0f} s)"
        now = self.latest
        parts = [f"step {now['step']}/{now['steps']}", f"loss {now['loss']:.4f}"]
        if now.get("grad_norm") is not None:
            parts.append(f"grad norm {now['grad_norm']:.3f}")
        parts.append(f"{now['tokens_per_s']:,.0f} tokens/s")
        if now.get("mfu") is not None:
            parts.append(f"MFU {now['mfu']:.1%}")
        waits = now.get("data_s", 0.0) * now["tokens_per_s"] / max(now["tokens"], 1)
        if waits >= _SHOWN_WAIT:
            parts.append(f"{waits:.0%} of the time waiting for data")
        if self._state:
            parts.append(f"{human_bytes(self._state)}/rank")
        if now.get("skipped"):
            parts.append("SKIPPED: not finite" if now["tokens"] else "SKIPPED: no valid label")
        if now["seconds_left"] is not None:
            parts.append(f"{seconds_text(now['seconds_left'])} left")
        return "  ".join(parts)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.text import Text

        if not hasattr(self, "_spinner"):
            self._spinner = Spinner("dots")
        self._spinner.update(text=Text(self.status()))
        if not self.latest:
            return self._spinner
        bar = ProgressBar(total=self.latest["steps"], completed=self.latest["step"], width=60)
        return Group(self._spinner, bar)

    def _print_progress(self) -> None:
        told, quiet = None, _QUIET_S
        while not self._end.wait(0.2):
            now = self._clock()
            # A run of hours must not fill its log with progress lines.
            least = _QUIET_S if now - self._started < _EARLY_S else _QUIET_LATER_S
            is_new = self.phase != "training" or told is not self.latest
            quiet = least if is_new else max(least, quiet)
            if now - self._spoken >= quiet:
                told = self.latest
                # Progress that has not changed is printed ever more rarely.
                quiet = least if is_new else min(2 * quiet, _QUIET_LATER_S)
                try:
                    self.say(f"{'':<9}  {self.status() if is_new or not self.latest else self._waiting()}")
                except BrokenPipeError:
                    return  # the main thread notices at its next line, and ends the run

    def _waiting(self) -> str:
        """The progress line while no new step has come: the last step, and the seconds since."""
        seconds = self._clock() - self._news_since
        return f"step {self.latest['step']}/{self.latest['steps']}, and no other for {seconds:.0f} s"


def seconds_text(seconds: float) -> str:
    """A duration as text: "48 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _printable(text: str) -> str:
    """A model's text in one line; control characters, which a terminal could obey, become blanks."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _wrapped(line: str, width: int) -> list[str]:
    # Broken only between words: a path that is cut at a hyphen cannot be copied.
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]


def _continued(command: str, width: int) -> list[str]:
    """A command wrapped over several lines, with the shell's backslashes; never within quotes, where a backslash is one."""
    lines = [""]
    for word in _SHELL_WORD.findall(command):
        is_first = not lines[-1] or (len(lines[-1]) + len(word) < width - 4)
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if is_first else [*lines, word]
    first, *rest = lines
    lines = [first, *(f"  {line}" for line in rest)]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 110  # some terminals report 0
    except (OSError, ValueError):  # not a terminal, or without a descriptor
        return 110
