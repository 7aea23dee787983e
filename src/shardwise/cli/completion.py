"""``shardwise completion bash|zsh|fish``: prints a script that completes commands, options, keys and their values.

The script asks ``shardwise completion SHELL --words WORD ...`` what the last word can be: :func:`candidates` answers from the
commands' parsers and the records of the configuration, so it knows what they know.
"""

import argparse
import importlib
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from shardwise.cli.arguments import Parser, parser_of

_OWN = {"--help": "show the commands", "--version": "show the version"}
_BASH = r"""# Completion of shardwise for bash: source <(shardwise completion bash)
_shardwise() {
    local IFS=$'\n' current="${COMP_WORDS[COMP_CWORD]}"
    [[ $current == "=" ]] && current=""  # --key=value is three words where bash breaks words at an =
    COMPREPLY=($(compgen -W "$("${COMP_WORDS[0]}" completion bash --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "$current"))
    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o bashdefault -o default -F _shardwise shardwise
"""
_ZSH = r"""#compdef shardwise
# Completion of shardwise for zsh: source <(shardwise completion zsh)
_shardwise() {
    local -a offered=(${(f)"$("${words[1]}" completion zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ! $#offered )); then
        compset -P '--*='
        _files
        return
    fi
    compadd -- ${offered:#*=}
    compadd -S '' -- ${(M)offered:#*=}
}
if [[ $funcstack[1] == _shardwise ]]; then
    _shardwise "$@"
else
    compdef _shardwise shardwise
fi
"""
_FISH = r"""# Completion of shardwise for fish: shardwise completion fish | source
function __shardwise
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion fish --words $words[2..-1] 2>/dev/null
end
complete -c shardwise -n __fish_use_subcommand -f
complete -c shardwise -a '(__shardwise)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=(*SCRIPTS,), help="bash, zsh or fish")
    parser.add_argument("--words", dest="line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
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
    if args.line is None:
        print(SCRIPTS[args.shell], end="")
        return 0
    for word, text in candidates(args.line).items():
        print(f"{word}\t{text}" if args.shell == "fish" and text else word)
    return 0


def candidates(words: Sequence[str]) -> dict[str, str]:
    """What the last of ``words``, those behind the program's name, can become, and what it does; none: a file, or a value that is
    not known. A value behind an ``=`` that is a word of its own, as in bash, comes without its key."""
    from shardwise.cli.main import COMMANDS

    *before, current = words
    if not before:
        return _beginning(current, {**{name: text for name, (_, text) in COMMANDS.items()}, **_OWN})
    if before[0] not in COMMANDS:
        return {}
    module, text = COMMANDS[before[0]]
    command = importlib.import_module(module)
    actions = parser_of(before[0], text, command)._actions
    keys = command.keys() if hasattr(command, "keys") else []
    for split in before[-1:] if current == "=" else before[-2:-1] if before[-1] == "=" else []:
        return _beginning(current.removeprefix("="), _values_of(split, keys))
    if any(before[-1] in action.option_strings for action in actions if action.nargs != 0):
        return {}
    if "=" in current:
        key = current.partition("=")[0]
        return _beginning(current, {f"{key}={value}": "" for value in _values_of(key, keys)})
    if current.startswith("-"):
        options = [action for action in actions if action.help != argparse.SUPPRESS]
        flags = {flag: action.help or "" for action in options for flag in action.option_strings if flag[:2] == "--"}
        return _beginning(current, {**flags, **{f"--{key}=": "" for key in keys}})
    first = next((action for action in actions if not action.option_strings), None)
    return _beginning(current, dict.fromkeys(first.choices or (), "") if first is not None and not before[1:] else {})


def _beginning(current: str, words: dict[str, str]) -> dict[str, str]:
    return {word: text for word, text in words.items() if word.startswith(current)}


def _values_of(option: str, keys: Sequence[str]) -> dict[str, str]:
    """The values that a key, written as an option, can have; none: any."""
    from shardwise.config.check import struct_in
    from shardwise.config.record import hints_of
    from shardwise.run.config import RunConfig

    if (name := option.removeprefix("--")) not in keys:
        return {}
    record: Any = RunConfig
    *sections, last = name.split(".")
    for section in sections:
        record = struct_in(hints_of(record)[section])
    return dict.fromkeys(_values(hints_of(record)[last]), "")


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
