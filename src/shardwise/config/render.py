"""Write a configuration as YAML: to save it, to show where each value came from, and to explain every key.

The text of :func:`dump_config` loads back to an equal configuration. It is written here rather than by a YAML library
because each line has its own comment, and ``--help`` should not wait for the library.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from shardwise.config.check import describe_type, doc_of, struct_in
from shardwise.config.loader import Loaded
from shardwise.config.record import default_of, hints_of

# Words that a YAML 1.1 reader would not read as text are quoted too, so that other tools read the same text.
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_PLAIN = re.compile(r"(?:[A-Za-z_/]|\.{1,2}/)[\w/.=+-]*", re.ASCII)


def dump_config(config: msgspec.Struct) -> str:
    return "".join(f"{line}\n" for line, _ in _lines(config))


def print_config(loaded: Loaded[Any]) -> str:
    """The configuration as YAML; each line of a value ends in a comment that says where the value came from.

    The line of a section ends in the description of the section.
    """
    lines = list(_lines(loaded.config))
    width = min(48, max(len(line) for line, _ in lines))
    return "".join(f"{line:<{width}}  # {_comment(path, loaded)}\n" for line, path in lines)


def config_help(cls: type[msgspec.Struct]) -> str:
    """Every key of a configuration with its default and its description, as ``--help`` shows it."""
    return "\n".join(_help_lines(cls, ""))


def _help_lines(cls: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for key, hint in hints_of(cls).items():
        default = default_of(cls, key)
        if isinstance(default, msgspec.Struct):
            yield f"  {prefix}{key}: {doc_of(hint)}"
            yield from _help_lines(type(default), f"{prefix}{key}.")
        else:
            yield f"    {prefix}{key}={flow_text(default)}"
            yield f"        {doc_of(hint)} [{describe_type(hint)}]"


def _lines(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Each line of the YAML text, with the path of the key on it."""
    found: list[tuple[str, tuple[str, ...]]] = []
    items = (
        {key: getattr(value, key) for key in value.__struct_fields__} if isinstance(value, msgspec.Struct) else value
    )
    for key, inner in items.items():
        here = (*path, key)
        label = f"{'  ' * len(path)}{_text(key)}:"
        if isinstance(inner, msgspec.Struct) or (isinstance(inner, dict) and inner):
            found += [(label, here), *_lines(inner, here)]
        else:
            found.append((f"{label} {flow_text(inner)}", here))
    return found


def _comment(path: tuple[str, ...], loaded: Loaded[Any]) -> str:
    dotted = ".".join(path)
    if dotted in loaded.origins:
        return loaded.origins[dotted]
    inside = {origin for known, origin in loaded.origins.items() if known.startswith(f"{dotted}.")}
    return _section_doc(type(loaded.config), path) or ", ".join(sorted(inside))


def _section_doc(cls: type[msgspec.Struct], path: tuple[str, ...]) -> str:
    hint: Any = None
    record: type[msgspec.Struct] | None = cls
    for part in path:
        if record is None or part not in hints_of(record):
            return ""
        hint = hints_of(record)[part]
        record = struct_in(hint)
    return doc_of(hint) if record else ""


def flow_text(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)}: {flow_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow_text(inner) for inner in value) + "]"
    if isinstance(value, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    return json.dumps(value) if value is None or isinstance(value, int) else _text(str(value))


def _text(text: str) -> str:
    """Text as YAML, quoted unless every YAML reader reads it as exactly this text."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + "".join(_escape(char) for char in text) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
