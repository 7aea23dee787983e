"""``shardwise completion bash|zsh|fish``: prints a script that completes commands, options, keys and their values.

It is made of the commands' parsers and the records of the configuration when it is printed, so it knows what they know.
"""

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from shardwise.cli.arguments import Parser, parser_of

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Offer:
    """What can follow a command.

    Attributes:
        name, text: of the command.
        flags: options -> what they do.
        valued: those of them that a value follows.
        words: what its first argument can be, if only some words.
        keys: ``--section.key`` -> the values it can have; none: any.
    """

    name: str
    text: str
    flags: Mapping[str, str]
    valued: tuple[str, ...]
    words: tuple[str, ...]
    keys: Mapping[str, tuple[str, ...]]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    parser.usage = "shardwise completion bash|zsh|fish"


def more_help() -> str:
    """Help text: what to do with the script."""
    return (
        "for this shell, and for those to come:\n"
        "  bash: source <(shardwise completion bash)               and the same line in ~/.bashrc\n"
        "  zsh:  source <(shardwise completion zsh)                and the same line in ~/.zshrc, after compinit\n"
        "  fish: shardwise completion fish | source                and > ~/.config/fish/completions/shardwise.fish"
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.cli.completion_scripts import SCRIPTS

    print(SCRIPTS[args.shell](offers()), end="")
    return 0


def offers() -> list[Offer]:
    """What can follow each command, in the order of the help."""
    from shardwise.cli.main import COMMANDS

    return [_offer(name, module, text) for name, (module, text) in COMMANDS.items()]


def _offer(name: str, module: str, text: str) -> Offer:
    command = importlib.import_module(module)
    actions = parser_of(name, text, command)._actions
    options = [action for action in actions if action.option_strings]
    flags = {option: action.help or "" for action in options for option in action.option_strings if option[:2] == "--"}
    valued = [option for action in options if action.nargs != 0 for option in action.option_strings]
    first = next((action for action in actions if not action.option_strings), None)
    words = tuple(first.choices or ()) if first is not None else ()
    return Offer(name, text, flags, tuple(valued), words, _keys(command.keys() if hasattr(command, "keys") else []))


def _keys(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Keys of the configuration as options, with the values that each can have."""
    from shardwise.config.check import struct_in
    from shardwise.config.record import hints_of
    from shardwise.run.config import RunConfig

    found = {}
    for name in names:
        record: Any = RunConfig
        *sections, last = name.split(".")
        for section in sections:
            record = struct_in(hints_of(record)[section])
        found[f"--{name}"] = _values(hints_of(record)[last])
    return found


def _values(hint: Any) -> tuple[str, ...]:
    """The words that a key of this type can have: those of a Literal, true and false, and null next to them."""
    if get_origin(hint) is Literal:
        return tuple(word for word in get_args(hint) if isinstance(word, str))
    if hint is bool:
        return ("true", "false")
    if get_origin(hint) not in (Annotated, Union, UnionType):
        return ()
    inner = tuple(dict.fromkeys(word for arg in get_args(hint) for word in _values(arg)))
    return (*inner, "null") if inner and type(None) in get_args(hint) else inner
