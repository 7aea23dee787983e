"""Where the figures of a run go besides ``metrics.jsonl``: CSV, TensorBoard, Weights & Biases, or a logger of your own.

Torch-free until a TensorBoard file is opened: what is missing is an error before a process starts.
"""

import contextlib
import csv
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.config.target import check_target, load_target
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.run.config import RunConfig


class Logger(Protocol):
    """Takes the figures of a run. Only rank 0 has one.

    A function that ``log.to`` names returns one: ``make(folder, config, done)``, of the run's folder, its configuration as a
    dict, and the number of steps that were done before (of a run that resumes).
    """

    def log(self, row: Mapping[str, Any]) -> None:
        """Takes one row as ``metrics.jsonl`` has it: ``kind`` ("step", "val", "memory", "sample", ...), mostly ``step``, and
        its figures. Called between two steps, so it must be quick. If it raises, the run goes on without it."""

    def close(self) -> None:
        """Called at the end of the run, also if that is an error."""


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a row, by name; those in mappings as ``memory/rss``. Truth values are 0 and 1."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)) and (prefix or name not in ("kind", "step", "steps")):
            yield f"{prefix}{name}", float(value)


class CSVLogger:
    """``metrics.csv``: a line for each row of figures with its kind and step, a column for each name.

    A name that comes later adds a column to the whole file, which is replaced atomically.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        self.path = folder / "metrics.csv"
        self._columns = ["kind", "step"]
        rows: list[dict[str, str]] = []
        if done and self.path.exists():
            with open(self.path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if int(row["step"] or 0) <= done]
                self._columns = list(reader.fieldnames or self._columns)
        elif self.path.exists():
            os.replace(self.path, self.path.with_name("metrics.previous.csv"))
        self._rewrite(rows)

    def log(self, row: Mapping[str, Any]) -> None:
        figures = {name: _number(value) for name, value in scalars(row)}
        if not figures:
            return
        line = {"kind": str(row.get("kind", "")), "step": str(row.get("step", "")), **figures}
        new = [name for name in line if name not in self._columns]
        if new:
            with open(self.path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(line)

    def close(self) -> None:
        pass

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        new = self.path.with_name(f".{self.path.name}.new")
        with open(new, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self.path)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


class TensorBoardLogger:
    """Event files below ``tensorboard``: ``tensorboard --logdir DIR``. Scalars by kind, as ``step/loss``, and texts."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        from torch.utils.tensorboard import SummaryWriter

        from shardwise.config.render import flow_text

        place = folder / "tensorboard"
        if not done:
            _move_aside(place)
        # What an ended run had written of later steps is dropped, as they are done again.
        self._writer = SummaryWriter(str(place), purge_step=done + 1 if done else None)
        self._writer.add_text(
            "config", "\n".join(f"    {key}: {flow_text(value)}" for key, value in config.items()), done
        )

    def log(self, row: Mapping[str, Any]) -> None:
        kind, step = str(row.get("kind", "")), row.get("step")
        for name, value in scalars(row):
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        if kind == "sample":
            self._writer.add_text(f"sample/{row['when']}", f"{row['prompt']}**|**{row['text']}", step)
        if kind == "val":
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases, in ``wandb`` below the run's folder; one that resumes goes on with the same one.

    Args:
        config: the configuration; ``log.project``, ``log.name`` and ``log.wandb_mode`` are read.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        import wandb

        log, kept = config["log"], folder / "wandb" / "shardwise-run-id"
        known = kept.read_text(encoding="utf-8").strip() if done and kept.exists() else None
        kept.parent.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=log["project"],
            name=log["name"] or folder.resolve().name,
            dir=str(folder.resolve()),  # its own process may have another working directory
            config=dict(config),
            mode=log["wandb_mode"],
            id=known,
            resume="allow" if known else None,
            # Its lines about itself would mix with the run's; output stays where the user sent it.
            settings=wandb.Settings(silent=True, console="off"),
        )
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")
        # Steps are a figure of their own, so that those that are done again after a resume are accepted.
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")

    def log(self, row: Mapping[str, Any]) -> None:
        kind = str(row.get("kind", ""))
        figures = {f"{kind}/{name}": value for name, value in scalars(row)}
        if figures:
            self._run.log({**figures, **({"train_step": row["step"]} if "step" in row else {})})

    def close(self) -> None:
        self._run.finish()


_KNOWN: dict[str, tuple[str, Callable[..., Logger]]] = {  # word -> the package that it needs, and the class
    "csv": ("", CSVLogger),
    "tensorboard": ("tensorboard", TensorBoardLogger),
    "wandb": ("wandb", WandbLogger),
}


def check_loggers(to: Sequence[str], wandb_mode: str | None, origin: str) -> None:
    """Refuses a logger whose package is not installed, a function that does not exist, and Weights & Biases online where
    no key is known: it would ask for one."""
    for word in to:
        if word not in _KNOWN:
            check_target(word, what="log.to", origin=origin)
            continue
        package = _KNOWN[word][0]
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log.to={word} ({origin})", why=f"{package} is not installed", fix="pip install 'shardwise[log]'"
            )
    if "wandb" in to and (wandb_mode or os.environ.get("WANDB_MODE", "online")) == "online" and not _has_key():
        raise ConfigError(
            f"log.to=wandb ({origin})",
            why="it sends the run to wandb.ai, for which no key is known here",
            fix="run: wandb login; or keep it here, to send it later by `wandb sync`: --log.wandb_mode=offline",
        )


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    with contextlib.suppress(OSError):
        name = os.environ.get("NETRC") or str(Path.home() / (".netrc" if os.name != "nt" else "_netrc"))
        return "wandb" in Path(name).read_text(encoding="utf-8", errors="replace")
    return False


class Loggers:
    """The loggers of a run, on rank 0. One that fails is left out from then on, and told once.

    Args:
        trouble: called with a text about a logger that failed.
    """

    def __init__(self, config: "RunConfig", folder: Path, done: int, trouble: Callable[[str], None]):
        import msgspec

        self._trouble, self._loggers = trouble, {}
        values: Mapping[str, Any] = msgspec.to_builtins(config)
        for word in config.log.to:
            make = _KNOWN[word][1] if word in _KNOWN else load_target(word, what="log.to")
            with self._told(word):
                self._loggers[word] = _made(make(folder, values, done))

    def log(self, row: Mapping[str, Any]) -> None:
        for word in list(self._loggers):
            with self._told(word):
                self._loggers[word].log(row)

    def close(self) -> None:
        """Closes all; a second time does nothing."""
        while self._loggers:
            word, logger = self._loggers.popitem()
            with self._told(word):
                logger.close()

    @contextlib.contextmanager
    def _told(self, word: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a library or the user's: training is worth more than its picture
            failed = self._loggers.pop(word, None)
            if failed is not None:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    failed.close()
            self._trouble(f"log.to={word}: {type(error).__name__}: {error}; training goes on without it")


def _made(logger: Any) -> Logger:
    missing = [name for name in ("log", "close") if not callable(getattr(logger, name, None))]
    if missing:
        raise TypeError(f"it returned {type(logger).__name__}, which has no {' and no '.join(missing)}()")
    return logger


def _move_aside(place: Path) -> None:
    """Renames what an older run has left to ``NAME.previous``, which is replaced."""
    if not place.exists():
        return
    older = place.with_name(f"{place.name}.previous")
    if older.exists():
        import shutil

        shutil.rmtree(older, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.replace(older)
