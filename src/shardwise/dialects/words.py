"""Options of other tools in a command line or a file of ours: each is answered from the row of its table with what to write.

>>> hint("--learning-rate", "2e-5", "override").fix
'write --optim.lr=2e-5'
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwise.config.torch_options import Place
from shardwise.dialects.collect import detect
from shardwise.dialects.table import Row, Table, head_of, load
from shardwise.dialects.values import RefusedError, word_of
from shardwise.errors import ConfigError

_SWITCHED = ("true", "false", "1", "0")
_MOST_SHOWN = 12
_LEAST_KNOWN = 0.8  # the part of keys that must be a system's for a file to be taken for one of its own
_USUAL = ("-1", "none", "auto", "no", "false", "")  # values that stand for what a run does by itself
_IN_STEPS = ("warmup", "log_every", "eval_steps", "save_steps")  # below one they are a part of the run
_PART = re.compile(r"0?\.\d+")
_PREFIXES = ("fsdp_", "parallelism_config_", "dynamo_")
_WHOLE = "what it means depends on other keys: import the whole configuration: shardwise import-config FILE"


@dataclass(frozen=True)
class Hint:
    """What to write in place of an option: how it was given, the fix, and the systems that have the option."""

    given: str
    fix: str
    tools: tuple[str, ...]


@cache
def _index() -> tuple[dict[str, list[tuple[Table, Row]]], dict[str, list[tuple[Table, Row]]]]:
    """Key -> its rows, and last part of a key -> rows of such keys, in the order in which meanings count."""
    whole: dict[str, list[tuple[Table, Row]]] = {}
    last: dict[str, list[tuple[Table, Row]]] = {}
    for table in map(load, ("words", *head_of("words").words("order"))):
        for key in table.plain_keys:
            row = table.rows[key]
            row = table.rows.get(row.alias, row)
            whole.setdefault(key.lower(), []).append((table, row))
            bare = key.rpartition(".")[2].lower()
            for word in {bare, *(bare.removeprefix(prefix) for prefix in _PREFIXES)}:
                last.setdefault(word, []).append((table, row))
    return whole, last


def _rows_of(name: str, *, inside: bool = False) -> list[tuple[Table, Row]]:
    """The rows of an option, ``-`` and ``_`` being the same; in a section of ours, or as a bare word, by its last part too."""
    plain = name.lstrip("-").replace("-", "_").lower()
    whole, last = _index()
    found = whole.get(plain, [])
    if not found and (inside or "." not in plain):
        bare = plain.rpartition(".")[2]
        found = whole.get(bare) or last.get(bare, [])
    return found


def hint(name: str, value: Any, place: Place, *, inside: bool = False) -> Hint | None:
    """The hint for an option ``name``; None if it is of no other tool.

    Args:
        value: as it was written; None: no value.
        inside: it is in a section that we have.
    """
    rows = _rows_of(name, inside=inside)
    if not rows:
        return None
    _, row = rows[0]
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    given = f"{name} {text}".strip() if place == "override" else f"{name}: {text}"
    tools = tuple(dict.fromkeys(table.name for table, _ in rows if table.name != "words"))
    return Hint(given, _fix(row, text or ("true" if "bool" in row.takes else ""), place), tools)


def _fix(row: Row, text: str, place: Place) -> str:
    try:
        value = row.coerced(text, row.key) if text else None
    except RefusedError as error:
        return error.text
    word = word_of(value) if text else ""
    verdict, say = row.answer_of(word)
    say = say.replace("{}", text or "N")
    if verdict == "refused":
        return say
    overrides, says = [], []
    actions = row.action_of(word)
    for action in actions:
        target, is_constant, constant = action.partition("=")
        value = constant.replace("{}", text or "N") if is_constant else text
        ours, more = _override(target[1:], value) if target[0] == "@" else (f"{target.strip('+')}={value or 'N'}", "")
        overrides += [ours] if ours else []
        says += [more.replace("{}", text or "N")] if more and not say else []
    if not overrides and any(action.startswith("@") for action in actions) and word not in _USUAL:
        return "; ".join(filter(None, [_WHOLE, say]))
    if not overrides:
        return f"leave it out: {say}" if say else "leave it out"
    return "; ".join([*(_shown(ours, place) for ours in overrides), *filter(None, [say]), *says])


def _override(fact: str, value: str) -> tuple[str, str]:
    """The override that a fact stands for, and what to know of it; empty: none. A row of ``tables/words.md`` says it."""
    row = load("words").rows.get(f"@{fact}")
    if row is None or (fact in _IN_STEPS[1:] and _PART.fullmatch(value)):
        return "", ""
    if fact in _IN_STEPS and _PART.fullmatch(value):
        return f"schedule.warmup_ratio={value}", ""
    ours = row.action_of(value) or row.action_of(value.split(" ")[0])
    if not ours or (row.actions.keys() == {""} and value.lower() in _USUAL):
        return "", ""
    return ours[0].replace("{}", value), row.says[""]


def _shown(override: str, place: Place) -> str:
    """An override as it is to be written: quoted for a shell, or as sections of a file."""
    if place == "override":
        return f"write {shlex.quote(f'--{override}')}"
    key, _, value = override.partition("=")
    inner = json.dumps(value) if "," in value and value[0] not in "[{" else value
    *sections, last = key.split(".")
    line = f"{last}: {inner}"
    for section in reversed(sections):
        line = f"{section}: {{{line}}}"
    return f"write {line}"


def override_error(key: str, value: str, *, inside: bool) -> ConfigError | None:
    """The error that shows what to write for an override of another tool; None if it is of none. ``inside`` a section that
    we have."""
    name = key.rpartition(".")[2].replace("-", "_")
    found = hint(f"--{key}", value, "override", inside=inside)
    is_ours = found is not None and f".{name}=" in found.fix
    return None if found is None or is_ours else _error(f"override --{key}={value}", [found])


def command_line_error(
    prog: str, words: Sequence[str], own: Sequence[str], sections: Sequence[str]
) -> ConfigError | None:
    """The error that shows what to write for all options of other tools in a command line; None if there are none.

    Args:
        own: options that the command has.
    """
    found: list[Hint] = []
    passed = False  # the word before was an option of another tool, whose value this is
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if passed or not _may_be_foreign(name, equals, value, own, sections):
            passed = False
            continue
        after = words[index + 1] if index + 1 < len(words) and not equals else None
        is_value = _is_value(after, _rows_of(name))
        if (one := hint(name, value if equals else after if is_value else None, "override")) is not None:
            found.append(Hint(word, one.fix, one.tools) if equals else one)
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


def _is_value(after: str | None, rows: Sequence[tuple[Table, Row]]) -> bool:
    """Whether the word after an option is its value: of a switch only true or false."""
    if after is None or not rows or after.startswith("--"):
        return False
    return {*rows[0][1].takes} - {"none"} != {"bool"} or after.lower() in _SWITCHED


def file_error(unknown: Mapping[str, Any], path: Sequence[str], origin: str) -> ConfigError | None:
    """The error that shows what to write for keys of other tools in a file; None if there are none.

    Args:
        unknown: the keys of a section that we do not have.
        origin: where the first was written.
    """
    found = _hints_in(unknown, path, inside=bool(path))
    return _error(f"{', '.join(one.given for one in found[:_MOST_SHOWN])} ({origin})", found) if found else None


def _hints_in(values: Mapping[str, Any], path: Sequence[str], *, inside: bool) -> list[Hint]:
    """The hints for keys of a file, sections of other tools included; ``inside`` a section that we have."""
    found: list[Hint] = []
    for key, value in values.items():
        name = ".".join((*path, key))
        if isinstance(value, Mapping):
            found += _hints_in(value, (*path, key), inside=inside)
        elif (one := hint(name, value, "file", inside=inside)) is not None:
            found.append(one)
    return found


def foreign_file(values: Mapping[str, Any], path: str) -> ConfigError | None:
    """The error for a file that is another system's as a whole; None: it is not."""
    try:
        name = detect(values, least=_LEAST_KNOWN)
    except ConfigError:
        return None
    return ConfigError(
        f"configuration file {path}",
        why=f"it is a configuration of {name}",
        fix=f"import it: shardwise import-config {path} -o run.yaml",
    )


def _error(given: str, found: Sequence[Hint]) -> ConfigError:
    tools = list(dict.fromkeys(tool for one in found for tool in one.tools))
    plural = len(found) > 1
    of = f"{', '.join(tools[:2])} and others" if len(tools) > 2 else " and ".join(tools) or "other tools"
    lines = [f"{one.given}: {one.fix}" for one in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        lines.append(f"and {len(found) - _MOST_SHOWN} more")
    return ConfigError(
        given,
        why=f"{'these are options' if plural else 'it is an option'} of {of}; Shardwise has other keys for what "
        f"{'they do' if plural else 'it does'}, or none",
        fix="\n       ".join(lines) if plural else found[0].fix,
    )
