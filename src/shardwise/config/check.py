"""Check one value against its declared type, and describe what was expected as text.

msgspec decides whether a value fits; this file writes the messages. The same check is used for a value from a file,
from an override and from Python code, so all three give the same message and differ only in ``where``.
"""

import math
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from shardwise.config.suggest import closest
from shardwise.errors import ConfigError


def checked(value: Any, hint: Any, *, where: str, key: str) -> Any:
    """``value`` converted to the type ``hint`` (lists become tuples, whole floats ints), or a :class:`ConfigError`.

    Args:
        hint: the field's type, with its ``Annotated`` limits.
        where: the value and where it was given, for the message (``train.steps = 'many' (run.yaml:7)``).
        key: the key alone, for the example in the fix (``steps``).
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(where, why="it is not a finite number", fix=f"{key} takes {describe_type(hint)}")
    try:
        return msgspec.convert(_whole(value, hint), hint)
    except msgspec.ValidationError as error:
        if (fault := _fault_within(value, hint, key)) is not None:
            fix = ": ".join(filter(None, (f"give {key} {describe_type(hint)}", doc_of(hint))))
            raise ConfigError(where, why=fault, fix=fix) from None
        expected = describe_type(hint)
        near = closest(value, _words(hint)) if isinstance(value, str) else None
        raise ConfigError(
            where,
            why=f"expected {expected}; got {describe_value(value, within=str(error))}",
            fix=f"did you mean '{near}'?" if near else f"give {key} {expected}",
        ) from None


def describe_type(hint: Any) -> str:
    """A type as text: ``a whole number >= 1, or null``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe_type(args[0]) + _limits(args[1:])
    if origin is Literal:
        return "one of " + ", ".join(repr(word) for word in args)
    if origin in (Union, types.UnionType):
        inner = [describe_type(arg) for arg in args if arg is not type(None)]
        return ", or ".join(inner + ["null"] * (type(None) in args))
    if origin is tuple:
        if args[1:] == (Ellipsis,):
            return f"a list (each: {describe_type(args[0])})"
        return f"a list of {len(args)} (each: {describe_type(args[0])})"
    if origin is dict and "Literal" in str(args[1]):
        return f"a mapping {{'name': word}}, each word {describe_type(args[1])}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"a mapping of {', '.join(hint.__struct_fields__)}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return "a mapping" if dict in (hint, origin) else names.get(hint, str(hint))


def describe_value(value: Any, *, within: str = "") -> str:
    """A value as text. ``within`` is msgspec's message, used to point at an element of a list."""
    if isinstance(value, list | tuple) and "$[" in within:
        index = int(within.rpartition("$[")[2].partition("]")[0])
        return f"{describe_value(value[index])} at place {index + 1} of the list"
    if value is None:
        return "null"
    kinds = {bool: "the switch", int: "the whole number", float: "the number", str: "the text"}
    if type(value) in kinds:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"{kinds[type(value)]} {shown}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"an object of type {type(value).__name__}"


def doc_of(hint: Any) -> str:
    """The description a field was declared with."""
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description), "")


def struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """The record type a field may hold (``str | Precision | None`` holds Precision), or None."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    args = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return next((found for arg in args if (found := struct_in(arg))), None)


def _whole(value: Any, hint: Any) -> Any:
    """``value`` as int if it is a whole float and ``hint`` takes int but not float: YAML's ``1e3`` is a float."""
    if isinstance(value, float) and value.is_integer() and int in _leaves(hint) and float not in _leaves(hint):
        return int(value)
    return value


def _fault_within(value: Any, hint: Any, key: str) -> str | None:
    """What is wrong with the first key or value of a mapping that does not fit, where ``hint`` allows mappings."""
    items = next((get_args(leaf) for leaf in _leaves(hint) if get_origin(leaf) is dict), None)
    if not isinstance(value, dict) or items is None:
        return None
    for name, item in value.items():
        for place, given, wanted in (("its key", name, items[0]), (f"{key}[{name!r}]", item, items[1])):
            try:
                msgspec.convert(given, wanted)
            except msgspec.ValidationError:
                return f"expected {describe_type(wanted)} as {place}; got {describe_value(given)}"
    return None


def _leaves(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return _leaves(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [leaf for arg in get_args(hint) for leaf in _leaves(arg)]
    return [hint]


def _words(hint: Any) -> list[str]:
    literals = [leaf for leaf in _leaves(hint) if get_origin(leaf) is Literal]
    return [word for literal in literals for word in get_args(literal) if isinstance(word, str)]


def _limits(metas: tuple[Any, ...]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f"{sign} {getattr(meta, name)}"
        for meta in metas
        if isinstance(meta, msgspec.Meta)
        for name, sign in signs.items()
        if getattr(meta, name) is not None
    ]
    return (" " + " and ".join(found)) if found else ""
