"""Read YAML, TOML and JSON into plain values, recording the line of every key.

One :class:`Layer` per source: nested dictionaries with text keys, and for each path of keys a text that says where it
was written (``run.yaml:12``). Syntax errors carry line and column; duplicate keys are refused with both lines.
YAML is 1.2: ``3e-4`` is a number, ``no`` is a text (a :class:`BareSwitch`), ``010`` is ten; dates stay text; tags and merge keys are
refused.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.check import describe_value
from shardwise.config.suggest import listing
from shardwise.errors import ConfigError

Keys = tuple[str, ...]
_MOST_BY_ALIASES = 100_000  # values of a text beyond its letters


@dataclass(kw_only=True)
class Layer:
    """The content of one source: nested values, and where each path of keys was written."""

    values: dict[str, Any]
    origins: dict[Keys, str] = field(default_factory=dict)


class BareSwitch(str):
    """``no``, ``yes``, ``on`` or ``off`` without quotes: a text in YAML 1.2, and false or true in 1.1, which PyYAML reads. Where no type
    says which was meant, the loader refuses it."""


_SWITCHES = frozenset(form for word in ("no", "yes", "on", "off") for form in (word, word.title(), word.upper()))


def read_file(path: Path) -> Layer:
    if path.suffix.lower() not in EXTENSIONS:
        ending = f"files ending in '{path.suffix}' are not read" if path.suffix else "it has no extension"
        raise ConfigError(
            f"configuration file {path}",
            why="it is a directory, and the configuration is a file in it" if path.is_dir() else ending,
            fix=f"use one of {listing(EXTENSIONS)}, or a function that returns the configuration: pkg.mod:fn",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration file {path}", why=f"byte {error.start} is not UTF-8", fix="save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"configuration file {path}",
            why=(error.strerror or "it cannot be read").lower(),
            fix=f"check the path; the working directory is {Path.cwd()}",
        ) from None
    try:
        return EXTENSIONS[path.suffix.lower()](text, str(path))
    except RecursionError:
        raise _too_deep(str(path)) from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"configuration file {path}", why="a number in it has thousands of digits", fix="write a shorter one"
        ) from None


def _too_deep(where: str) -> ConfigError:
    return ConfigError(where, why="its values lie within each other too deeply to be read", fix="write fewer levels")


def parse_yaml_value(text: str, where: str) -> Any:
    """The value of one YAML scalar or flow collection (``3e-4``, ``[1, 2]``, ``{a: 1}``), as overrides use it."""
    try:
        return _read_yaml_node(text, where, line=False)[0]
    except RecursionError:
        raise _too_deep(where) from None


def _read_yaml(text: str, file: str) -> Layer:
    values, origins = _read_yaml_node(text, file, line=True)
    if values is None:  # an empty file sets nothing
        return Layer(values={})
    return Layer(values=_mapping(values, file), origins=origins)


def _mapping(values: Any, file: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(
            f"configuration file {file}",
            why=f"it holds {describe_value(values)}, not sections with keys",
            fix="write sections, as in train: {steps: 500}",
        )
    return values


def _read_yaml_node(text: str, file: str, *, line: bool) -> tuple[Any, dict[Keys, str]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown place"
        context = f" {error.context}" if error.context else ""
        if error.context_mark and mark and error.context_mark.line != mark.line:
            context += f" that begins at line {error.context_mark.line + 1}, column {error.context_mark.column + 1}"
        raise _broken(
            "YAML", file, place if line else "", f"{error.problem}{context}", _yaml_hint(text, mark, line)
        ) from None
    except YAMLError as error:  # a character YAML does not allow
        position = getattr(error, "position", 0)
        place = f"line {text.count(chr(10), 0, position) + 1}" if line else ""
        fix = "remove it"
        if "\ud800" <= text[position] <= "\udfff":  # how Python passes on bytes that the locale does not know
            fix = "set a locale of UTF-8, LC_ALL=C.UTF-8, for letters outside ASCII"
        raise _broken("YAML", file, place, f"it holds the control character {text[position]!r}", fix) from None
    reader = _YamlReader(yaml, file, line, most=_MOST_BY_ALIASES + len(text))
    return (None if node is None else reader.value(node, ())), reader.origins


def _yaml_hint(text: str, mark: Any, line: bool) -> str:
    lines = text.splitlines()
    shown = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
    if mark and mark.line < len(lines) and "\t" in lines[mark.line]:
        return "indent with spaces, not with tabs"
    if not line and text.startswith("[") and "," in text:  # [INST],[/INST]
        parts = ", ".join(f'"{part.strip()}"' for part in text.split(","))
        return f"look at: {shown}; as a list of texts with brackets in them: '[{parts}]'"
    return f"look at: {shown}" if shown else "close what is open: a quote, a bracket or a brace"


def _broken(kind: str, file: str, place: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(f"{file}, {place}" if place else file, why=f"not valid {kind}: {problem}", fix=fix)


class _YamlReader:
    """Turns composed YAML nodes into values, recording the line of each key."""

    def __init__(self, yaml: Any, file: str, line: bool, most: int):
        self.yaml, self.file, self.line, self.left = yaml, file, line, most
        self.origins: dict[Keys, str] = {}
        self.open: list[int] = []

    def value(self, node: Any, path: Keys) -> Any:
        if id(node) in self.open:
            raise ConfigError(
                self.at(node), why=f"'{'.'.join(path)}' contains itself through an alias", fix="write the value out"
            )
        self.left -= 1
        if self.left < 0:  # without an alias a text cannot have more values than letters
            raise ConfigError(
                self.at(node), why="aliases make more values of the text than can be read", fix="write the values out"
            )
        self.open.append(id(node))
        kind = node.tag.rpartition(":")[2] if str(node.tag).startswith("tag:yaml.org,2002:") else str(node.tag)
        if kind == "map":
            result: Any = self.mapping(node, path)
        elif kind == "seq":
            result = [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        else:
            result = self.scalar(node, kind)
        self.open.pop()
        return result

    def mapping(self, node: Any, path: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            here = (*path, key)
            if key in result:
                raise ConfigError(
                    f"{self.at(key_node)}: '{'.'.join(here)}' is given twice",
                    why=f"it was given before, at {self.origins[here]}, and only one of them could count",
                    fix="remove one of the two",
                )
            self.origins[here] = self.at(key_node)
            result[key] = self.value(value_node, here)
        return result

    def key(self, node: Any) -> str:
        kind = str(node.tag).rpartition(":")[2]
        if kind == "merge":
            raise ConfigError(
                f"{self.at(node)}: key <<", why="merge keys are not part of YAML 1.2", fix="write the keys out"
            )
        if kind not in ("str", "timestamp"):
            shown = node.value if isinstance(node.value, str) else kind
            raise ConfigError(
                f"{self.at(node)}: key {shown}", why="keys are text, and this is not", fix=f'quote it: "{shown}"'
            )
        return node.value

    def scalar(self, node: Any, kind: str) -> Any:
        if kind in ("str", "timestamp"):
            return BareSwitch(node.value) if not node.style and node.value in _SWITCHES else node.value
        if kind in ("null", "bool", "int", "float"):
            try:
                return self.yaml.constructor.construct_object(node)
            except ValueError:
                why = f"a number of {len(node.value)} digits is not read"
                raise ConfigError(self.at(node), why=why, fix="write a shorter one") from None
        raise ConfigError(
            f"{self.at(node)}: tag {node.tag}",
            why="a configuration holds plain values; tags, which could build objects, are refused",
            fix="remove the tag",
        )

    def at(self, node: Any) -> str:
        return f"{self.file}:{node.start_mark.line + 1}" if self.line else self.file


def _read_toml(text: str, file: str) -> Layer:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place_in_message = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", message)
        numbers = place_in_message.groups() if place_in_message else (None, None)
        place = f"line {numbers[0]}, column {numbers[1]}" if numbers[0] else "at its end"
        problem = (message[: place_in_message.start()] if place_in_message else message).strip()
        shown = text.splitlines()[int(numbers[0]) - 1].strip() if numbers[0] else ""
        fix = f"look at: {shown}" if shown else "close what is open: a quote or a bracket"
        raise _broken("TOML", file, place, problem[:1].lower() + problem[1:], fix) from None
    return Layer(values=values, origins={path: f"{file}:{number}" for path, number in _toml_lines(text)})


def _toml_lines(text: str) -> Iterator[tuple[Keys, int]]:
    """The line at which each key of a valid TOML text is written.

    The standard parser keeps no lines, but a statement (a header, or a key with its value) is valid TOML by itself:
    lines are collected until they parse, and the keys they hold get the number of the first of these lines.
    """
    table: Keys = ()
    start, pending = 1, ""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not pending:
            start = number
        pending += line
        try:
            statement = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        paths = list(_paths(statement))
        if pending.lstrip().startswith("["):
            table = paths[-1]
            yield from ((path, start) for path in paths)
        else:
            yield from (((*table, *path), start) for path in paths)
        pending = ""


def _paths(values: dict[str, Any], prefix: Keys = ()) -> Iterator[Keys]:
    for key, value in values.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


def _read_json(text: str, file: str) -> Layer:
    if not text.strip():
        return Layer(values={})
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        shown = error.doc.splitlines()[error.lineno - 1].strip() if error.lineno <= len(error.doc.splitlines()) else ""
        fix = f"look at: {shown}" if shown else "close what is open: a quote, a bracket or a brace"
        place = f"line {error.lineno}, column {error.colno}"
        raise _broken("JSON", file, place, error.msg[:1].lower() + error.msg[1:], fix) from None
    # The standard parser keeps no lines and accepts duplicate keys. JSON is YAML, but for tabs, which are blanks here: in a text they
    # are escaped.
    _, origins = _read_yaml_node(text.replace("\t", " "), file, line=True)
    return Layer(values=_mapping(values, file), origins=origins)


EXTENSIONS: dict[str, Callable[[str, str], Layer]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
    ".json": _read_json,
}
"""The file endings that are read, and the function that reads each."""
