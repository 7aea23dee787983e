"""Finds options of other tools in a command line or a file, and shows what to write in their place. Torch-free.

>>> hint("--learning-rate", "2e-5", "override").fix
'write --optim.lr=2e-5'
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.config.other_tools_answers import Word
from shardwise.config.other_tools_table import WORDS
from shardwise.config.torch_options import Place
from shardwise.errors import ConfigError

_SWITCHED = ("true", "false", "1", "0")
_MOST_SHOWN = 12


@dataclass(frozen=True)
class Hint:
    """What to write in place of an option: how it was given, the fix, and the tools that have the option."""

    given: str
    fix: str
    tools: str


def _word_of(name: str, *, inside: bool = False) -> Word | None:
    """The option of another tool with this name, ``-`` and ``_`` being the same; None: none is known. ``inside`` a section of
    Shardwise (``train.learning_rate``), it is known by its last part too.
    """
    plain = name.lstrip("-").replace("-", "_")
    return WORDS.get(plain) or (WORDS.get(plain.rpartition(".")[2]) if inside else None)


def hint(name: str, value: Any, place: Place, *, inside: bool = False) -> Hint | None:
    """The hint for an option ``name``; None if it is of no other tool.

    Args:
        name: as it was written.
        value: as it was written; None: no value.
        place: where it was written.
        inside: it is in a section that Shardwise has.
    """
    word = _word_of(name, inside=inside)
    if word is None:
        return None
    text = _text(value)
    ours = _override(word, text)
    own = word.texts.get(text.lower())
    told = (word.text if own is None else own).replace("{}", text or word.like or "N")
    says = bool(told) and (own is not None or not word.write)  # a text that is an answer by itself
    write = _shown(ours, place) if ours else "" if says else "leave it out"
    fix = "; ".join(filter(None, (write, told if ours or says else "")))
    return Hint(f"{name} {text}".strip() if place == "override" else f"{name}: {text}", fix, word.tools)


def _override(word: Word, value: str) -> str:
    """The override to write, ``""`` if none."""
    plain = value.lower()
    if plain in word.values:
        return word.values[plain]
    first = plain.split()[0] if plain else ""
    if first in word.values:  # "full_shard auto_wrap"
        return word.values[first]
    if word.write.endswith("=VALUE"):
        known = dict.fromkeys(
            ours.partition("=")[2] for ours in word.values.values() if ours.startswith(word.write[:-5])
        )
        return f"{word.write[:-5]}{'|'.join(known)}"
    return word.write.replace("{}", value or word.like)


def _shown(override: str, place: Place) -> str:
    """An override as it is to be written: quoted for a shell, or as sections of a file."""
    if place == "override":
        return f"write {shlex.quote(f'--{override}') if '|' not in override else f'--{override}'}"
    key, _, value = override.partition("=")
    inner = json.dumps(value) if "," in value and value[0] not in "[{" else value
    *sections, last = key.split(".")
    line = f"{last}: {inner}"
    for section in reversed(sections):
        line = f"{section}: {{{line}}}"
    return f"write {line}"


def _text(value: Any) -> str:
    """A value as text, as a command line would have it."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def override_error(key: str, value: str, *, inside: bool) -> ConfigError | None:
    """The error that shows what to write for an override of another tool; None if it is of none. ``inside`` a section that
    Shardwise has."""
    name, word = key.rpartition(".")[2].replace("-", "_"), _word_of(key, inside=inside)
    if word is None or word.write.partition("=")[0].rpartition(".")[2] == name:
        return None  # the same name in a section: the reader of the configuration finds it
    told = hint(f"--{key}", value, "override", inside=inside)
    return None if told is None else _error(f"override --{key}={value}", [told])


def command_line_error(
    prog: str, words: Sequence[str], own: Sequence[str], sections: Sequence[str]
) -> ConfigError | None:
    """The error that shows what to write for all options of other tools in a command line; None if there are none.

    Args:
        prog: the command.
        words: its arguments.
        own: options that the command has.
        sections: those of its configuration.
    """
    found: list[Hint] = []
    passed = False  # the word before was an option of another tool, whose value this is
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if passed or not _may_be_foreign(name, equals, value, own, sections):
            passed = False
            continue
        after = words[index + 1] if index + 1 < len(words) and not equals else None
        is_value = _is_value(after, _word_of(name))
        if (told := hint(name, value if equals else after if is_value else None, "override")) is not None:
            found.append(Hint(word, told.fix, told.tools) if equals else told)
            passed = is_value
    return _error(f"{prog} {' '.join(one.given for one in found)}", found) if found else None


def _may_be_foreign(name: str, equals: str, value: str, own: Sequence[str], sections: Sequence[str]) -> bool:
    """Whether a word of a command line may be an option of another tool: no option of the command, and no key."""
    plain = name.lstrip("-")
    if name in own or (not name.startswith("--") and not equals) or value.startswith("{"):
        return False
    if plain.partition(".")[0] in sections and "." in plain:
        return False  # a key of ours: the reader of the configuration knows which there are
    return name.startswith("--") or not value.endswith((".yaml", ".yml", ".toml", ".json"))


def _is_value(after: str | None, word: Word | None) -> bool:
    """Whether the word after an option is its value: of a switch only true or false."""
    if after is None or word is None or after.startswith("--"):
        return False
    return bool(word.like) or after.lower() in _SWITCHED


def _hints_in(values: Mapping[str, Any], path: Sequence[str], *, inside: bool) -> list[Hint]:
    """The hints for keys of a file, sections of other tools included; ``inside`` a section that Shardwise has."""
    found: list[Hint] = []
    for key, value in values.items():
        name = ".".join((*path, key))
        if isinstance(value, Mapping):
            found += _hints_in(value, (*path, key), inside=inside)
        elif (told := hint(name, value, "file", inside=inside)) is not None:
            found.append(told)
    return found


def file_error(unknown: Mapping[str, Any], path: Sequence[str], origin: str) -> ConfigError | None:
    """The error that shows what to write for keys of other tools in a file; None if there are none.

    Args:
        unknown: the keys of a section that Shardwise does not have.
        path: the section.
        origin: where the first was written.
    """
    found = _hints_in(unknown, path, inside=bool(path))
    return _error(f"{', '.join(one.given for one in found[:_MOST_SHOWN])} ({origin})", found) if found else None


def _error(given: str, found: Sequence[Hint]) -> ConfigError:
    tools = list(dict.fromkeys(tool for one in found for tool in one.tools.split(", ") if tool != "other tools"))
    plural = len(found) > 1
    of = f"{', '.join(tools[:2])} and others" if len(tools) > 2 else ", ".join(tools) or "other tools"
    lines = [f"{one.given}: {one.fix}" for one in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        lines.append(f"and {len(found) - _MOST_SHOWN} more")
    return ConfigError(
        given,
        why=f"{'these are options' if plural else 'it is an option'} of {of}; Shardwise has other keys for what "
        f"{'they do' if plural else 'it does'}, or none",
        fix="\n       ".join(lines) if plural else found[0].fix,
    )
