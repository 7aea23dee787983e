"""``shardwise <command>``: finds the command, reads its arguments, runs it, and prints errors as text.

A command is one file of this folder with ``add_arguments(parser)`` and ``run(args) -> int``. With ``OVERRIDES = True``
it also takes ``--a.b=c`` (in ``args.overrides``; ``keys()`` are those it reads), with ``OTHER_TOOLS = True`` options of other tools are answered with
what to write in their place, and ``more_help() -> str`` adds to its ``--help``. Only the command that is called is
imported, so that help and errors appear at once.

Exit status: 0 done, 1 failed, 2 not understood (a :class:`~shardwise.errors.ConfigError`), 75 stopped after saving, can
be resumed (:class:`~shardwise.errors.Stopped`), 130 interrupted, 141 the reader of its output has gone.
``SHARDWISE_TRACEBACK=1`` shows where in the code an error came from.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from shardwise.cli.arguments import parser_of, read_arguments
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError, ShardwiseError, Stopped

COMMANDS = {
    "train": ("shardwise.cli.train", "train a model over local processes (with no file: a small model, in a minute)"),
    "generate": (
        "shardwise.cli.generate",
        "continue a text, or answer a message, with a model directory or a run's weights",
    ),
    "convert": ("shardwise.cli.convert", "weights of any kind to any other: Hugging Face, safetensors, torch, DCP"),
    "import-config": (
        "shardwise.cli.import_config",
        "a configuration of another system (accelerate, DeepSpeed, the Trainer, ...) as a run file, every key answered",
    ),
    "checkpoint": ("shardwise.cli.checkpoint", "list, show, verify and prune the checkpoints of a run"),
    "verify": ("shardwise.cli.verify", "run your model sharded and in one process, and compare every gradient"),
    "completion": ("shardwise.cli.completion", "a script by which bash, zsh or fish complete commands and keys"),
}
"""Command -> (module, line of help)."""


_BY_SIGNAL = {128 + number: number.name for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments without the program's name; None: those of this process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
        if sys.stdout is not None:  # closed before it began: >&-
            sys.stdout.flush()  # here, where what goes wrong can be told
        return status
    except ShardwiseError as error:
        if os.environ.get("SHARDWISE_TRACEBACK") == "1":
            raise
        print(error_text(error, sys.stderr) if error.shown_by is None else error.in_a_line(), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Stopped as stop:
        return stop.CODE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:
        if end.code in _BY_SIGNAL:  # of a launcher or scheduler: what was kept is printed already, this is the reason
            print(f"ended by {_BY_SIGNAL[end.code]}", file=sys.stderr)
        raise
    except BrokenPipeError:
        # The reader has gone (`| head -1`): end as other tools do, and do not let Python flush to it at exit.
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        try:
            print(flush=True)  # whether it is the output that fails: an error does not say which file it is of
        except OSError:
            _drop_output()
            print(f"the output cannot be written: {error.strerror or error}", file=sys.stderr)
            return 1
        raise


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_text(error: ShardwiseError, stream: TextIO) -> str:
    """An error as it is printed: its kind, what was given, why, fix; in colour if ``stream`` is a terminal."""
    kind, text = type(error).__name__, str(error)
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return f"{kind}: {text}"
    for label in ("why:", "fix:"):
        text = text.replace(f"\n  {label}", f"\n  \033[1m{label}\033[0m", 1)
    return f"\033[1;31m{kind}:\033[0m {text}"


def _run(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("-h", "--help"):
        print(_help())
        return 0
    if first == "--version":
        print(f"shardwise {_version()}")
        return 0
    if first not in COMMANDS:
        raise _unknown(first)
    command = importlib.import_module(COMMANDS[first][0])
    return command.run(read_arguments(command, parser_of(first, COMMANDS[first][1], command), words[1:]))


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: shardwise [--version] [--help] <command> ...",
            "",
            "Any PyTorch model, any layout, the same training.",
            "",
            "commands:",
            *lines,
            "",
            "Each command explains itself: shardwise train --help",
        ]
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardwise")
    except PackageNotFoundError:  # a source tree on the path that is not installed
        return "(not installed)"


def _unknown(word: str) -> ConfigError:
    if word.startswith("-"):
        return ConfigError(
            f"shardwise {word}",
            why="options go after the command, and this is none of shardwise's own",
            fix=did_you_mean(word, ["--help", "--version"], what="own options"),
        )
    return ConfigError(
        f"shardwise {word}",
        why=f"there is no command '{word}'",
        fix=did_you_mean(word, list(COMMANDS), what="commands"),
    )
