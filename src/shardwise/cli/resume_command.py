"""How a run was started: its configuration file, named or found, and the command that resumes it after its end."""

import argparse
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.config.loader import Loaded
    from shardwise.run.config import RunConfig


FOUND = "shardwise.yaml"
"""The configuration that is used where none is named, in the working directory."""

_RESUME = "checkpoint.resume="


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command of a run.

    Attributes:
        words: its words after ``shardwise train``, as typed.
        has_found: its configuration was not named: it is :data:`FOUND`.
        resumes: words to add so that it resumes, where its configuration starts from the beginning.
        is_of_launcher: torchrun or SLURM has started the ranks, by a command that is not known.
    """

    words: tuple[str, ...]
    has_found: bool = False
    resumes: tuple[str, ...] = ()
    is_of_launcher: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace, loaded: "Loaded[RunConfig]", *, is_of_launcher: bool) -> "Command":
        """The command with these arguments, which have given this configuration."""
        found = configuration_of(args)
        return cls(
            words=tuple(args.words),
            has_found=args.config is None and found is not None,
            resumes=() if loaded.config.checkpoint.resume or _resumes(found, args.overrides) else (f"--{_RESUME}true",),
            is_of_launcher=is_of_launcher,
        )

    @property
    def is_the_same(self) -> bool:
        """Whether the command as typed resumes the run."""
        return self._resuming() == self.words

    def resuming(self) -> str:
        """The command that resumes the run, for a shell."""
        return f"{program()} train {shlex.join(self._resuming())}".rstrip()

    def _resuming(self) -> tuple[str, ...]:
        return (*(word for word in self.words if word != "--fresh" and not _is_resume(word)), *self.resumes)


def _is_resume(word: str) -> bool:
    return word.removeprefix("--").startswith(_RESUME)


def _resumes(configuration: str | None, overrides: list[str]) -> bool:
    """Whether a run resumes once no option says the contrary."""
    from shardwise.run.config import load_config

    kept = [word for word in overrides if not _is_resume(word)]
    return load_config(configuration, kept).config.checkpoint.resume


def configuration_of(args: argparse.Namespace) -> str | None:
    """The configuration of a run: the one that is named, or :data:`FOUND` if it is in the working directory; None: the
    defaults.

    Raises:
        ConfigError: a configuration next to ``--no-config``, or a file with nearly that name.
    """
    if args.no_config:
        if args.config is not None:
            raise ConfigError(
                f"shardwise train {args.config} --no-config",
                why="one names a configuration, and the other asks for none",
                fix="leave one of them out",
            )
        return None
    if args.config is not None:
        return args.config
    if Path(FOUND).is_file():
        return FOUND
    other = Path(FOUND).with_suffix(".yml")
    if other.is_file():
        raise ConfigError(
            f"{other} in {Path.cwd()}",
            why=f"without a name only {FOUND} is read, so it would have no effect",
            fix=f"rename it to {FOUND}, or name it: shardwise train {other}; --no-config takes the defaults",
        )
    return None


# ---- the program -----------------------------------------------------------------------------------------------------


def program() -> str:
    """``python -m shardwise`` if that was typed, or there is no script; ``shardwise`` if the PATH leads to this one;
    ``.venv/bin/shardwise`` or the like in an environment that is not activated."""
    started, script = Path(sys.argv[0]), Path(sys.executable).with_name("shardwise")
    as_module = [_python(), "-m", "shardwise"]
    if started.name == "__main__.py":  # a script beside this Python may be of another installation
        return shlex.join(as_module)
    script = started if started.name == "shardwise" else script
    found = shutil.which("shardwise")
    if found is not None and script.exists() and os.path.samefile(found, script):
        return "shardwise"
    return shlex.join([_from_here(script)] if script.is_file() else as_module)


def _python() -> str:
    name = Path(sys.executable).name
    found = shutil.which(name)
    return name if found is not None and Path(found) == Path(sys.executable) else _from_here(Path(sys.executable))


def _from_here(path: Path) -> str:
    """The path, relative if it is below the working directory. Links are not resolved: an environment's Python is
    one."""
    place = Path(os.path.abspath(path))
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)
