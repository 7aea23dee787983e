"""Reads a command's arguments: options by argparse, with our own error messages, and dotted overrides.

``train run.yaml --train.steps=20 --nproc 2`` has a file, an override and an option. Overrides are taken out before
argparse runs, so they may be anywhere.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

from shardwise.config.suggest import closest, listing
from shardwise.errors import ConfigError

_OVERRIDE = re.compile(r"(?:--)?[A-Za-z_][\w-]*(?:\.[\w-]+)+=.*", re.DOTALL)
_OVERRIDE_WITHOUT_VALUE = re.compile(r"--[A-Za-z_][\w-]*(?:\.[\w-]+)+")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises :class:`ConfigError` for mistakes, and builds its long help only when it is
    shown."""

    def __init__(self, *, prog: str, description: str):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation could change its meaning when an option is added
        )
        self.more_help: Callable[[], str] | None = None
        self.instead: dict[str, str] = {}  # options of other commands that this one does not have -> what to write here

    def format_help(self) -> str:
        text = super().format_help()
        return _fitted(f"{text}\n{self.more_help()}\n" if self.more_help else text)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.prog, why=message, fix=f"see {self.prog} --help")

    def option_names(self) -> list[str]:
        """The long options that this parser has."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


def parser_of(name: str, text: str, command: ModuleType) -> Parser:
    parser = Parser(prog=f"shardwise {name}", description=f"{text[:1].upper()}{text[1:]}.")
    parser.more_help = getattr(command, "more_help", None)
    command.add_arguments(parser)
    return parser


def _fitted(text: str) -> str:
    """Wraps lines that are wider than the terminal, between words, with the rest indented below."""
    width = max(40, min(110, shutil.get_terminal_size().columns))
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2 * line.startswith("usage:"))
        fitted = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += fitted if len(line) > width else [line]
    return "".join(f"{line}\n" for line in lines)


def read_arguments(command: ModuleType, parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of one command, with ``overrides`` if it takes them, and ``words``, all of them as typed.

    Raises:
        ConfigError: an option is unknown or of another tool, an argument is missing or surplus, or an override has no
            value.
    """
    takes_overrides = getattr(command, "OVERRIDES", False)
    if getattr(command, "OTHER_TOOLS", False):
        _refuse_other_tools(words, parser)
    overrides, rest = _split(words, parser) if takes_overrides else ([], list(words))
    args, extra = parser.parse_known_args(rest)
    args.words = list(words)
    if takes_overrides:
        args.overrides = overrides
    if extra:
        raise _surplus(extra[0], parser, takes_overrides)
    return args


def _refuse_other_tools(words: Sequence[str], parser: Parser) -> None:
    """Raises ConfigError if there are options of other tools, showing what to write for each of them."""
    own = parser.option_names()
    if all(word.partition("=")[0] in own for word in words if word.startswith("--") or "=" in word):
        return  # the usual case, without the table
    from shardwise.dialects.words import command_line_error

    if (error := command_line_error(parser.prog, words, own, _sections())) is not None:
        raise error


def _split(words: Sequence[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Splits the words of a command line into overrides and the others."""
    overrides: list[str] = []
    rest: list[str] = []
    for index, word in enumerate(words):
        if _OVERRIDE_WITHOUT_VALUE.fullmatch(word):
            value = words[index + 1] if index + 1 < len(words) else "VALUE"
            raise ConfigError(
                f"{parser.prog} {word}",
                why="an override is one word, its value behind an '='",
                fix=f"write {word}={value}",
            )
        (overrides if _is_override(word, parser) else rest).append(word)
    return overrides, rest


def _is_override(word: str, parser: Parser) -> bool:
    """Whether a word is an override: ``--a.b=c``, ``a.b=c``, or a whole section, ``--train={...}``."""
    name, equals, _ = word.partition("=")
    if _OVERRIDE.fullmatch(word):
        return True
    if not equals or not name.startswith("--") or name in parser.option_names():
        return False
    if name[2:] not in _sections():
        # Refused here: argparse would take a word with a blank in it for a file.
        raise _surplus(word, parser, True)
    return True


def _surplus(word: str, parser: Parser, takes_overrides: bool) -> ConfigError:
    if not word.startswith("-"):
        return ConfigError(
            f"{parser.prog} ... {word}",
            why=f"'{word}' is one argument more than {parser.prog} takes",
            fix=parser.format_usage().strip(),
        )
    name, equals, value = word.partition("=")
    options = parser.option_names()
    if name in parser.instead:
        return ConfigError(f"{parser.prog} {word}", why=f"there is no option {name}", fix=parser.instead[name])
    near = closest(name, options) or (closest(name, _keys()) if takes_overrides else None)
    shown = f"{near}{equals}{value}" if near in options else f"{near}={value or 'VALUE'}"
    return ConfigError(
        f"{parser.prog} {word}",
        why=f"there is no option {name}",
        fix=f"did you mean {shown}?" if near else f"options: {listing(options)}",
    )


def _sections() -> list[str]:
    from shardwise.run.config import RunConfig

    return list(RunConfig.__struct_fields__)


def _keys() -> list[str]:
    from shardwise.config.loader import dotted_keys
    from shardwise.run.config import RunConfig

    return [f"--{key}" for key in dotted_keys(RunConfig)]
