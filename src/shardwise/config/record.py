"""``Options``, the base of all option records, and helpers that read its fields. Torch-free."""

import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import msgspec

from shardwise.config.check import checked
from shardwise.config.torch_options import why_and_fix
from shardwise.errors import ConfigError


def doc(text: str) -> msgspec.Meta:
    """The description of a field, shown by ``--help`` and in the docs."""
    return msgspec.Meta(description=text)


@cache
def hints_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Field name -> type of a record, in declaration order, with descriptions and limits."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


@cache
def _fields_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field for field in msgspec.structs.fields(cls)}


@cache
def _right_defaults(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Field -> its default, of those that were checked once and stay as they are: most fields of most records."""
    return {}


def default_of(cls: type[msgspec.Struct], key: str) -> Any:
    """The default value of one field (a new object, where it is a container)."""
    field = _fields_of(cls)[key]
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


class _Checked(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass of :class:`Options`: an unknown keyword raises ConfigError, like any other mistake in a record."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        known = cls.__struct_fields__
        for key, value in given.items():
            if key not in known:
                why, fix = why_and_fix(cls, key, known)
                raise ConfigError(f"{cls.__name__}({key}={value!r:.60})", why=why, fix=fix)
        return super().__call__(*args, **given)


class Options(msgspec.Struct, metaclass=_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all option records. Building one checks every field and turns lists into tuples."""

    # Fields that may also be a function, or a list that contains functions, when given from Python.
    functions: ClassVar[frozenset[str]] = frozenset()
    patterns: ClassVar[frozenset[str]] = frozenset()  # fields that name modules, and therefore also accept classes
    needless_with_build: ClassVar[tuple[str, ...]] = ()  # fields that say what the function in build says by itself
    also_called: ClassVar[Mapping[str, str]] = {}  # words that mean a field without being spelled like it -> the field

    def __post_init__(self) -> None:
        right = _right_defaults(type(self))
        for key, hint in hints_of(type(self)).items():
            value = getattr(self, key)
            if key in right and value is right[key]:
                continue
            if key in self.patterns:
                value = _with_class_names(value)
            inner = value if isinstance(value, list | tuple) else (value,)
            if key in self.functions and any(callable(each) or isinstance(each, Options) for each in inner):
                continue
            where = f"{type(self).__name__}({key}={value!r})"
            found = checked(value, hint, where=where, key=key)
            msgspec.structs.force_setattr(self, key, found)
            if found is value is _fields_of(type(self))[key].default:
                right[key] = value
        self.check()

    def check(self) -> None:
        """Checks fields against each other. Subclasses override it and raise :class:`ConfigError`."""

    def computed(self) -> dict[tuple[str, str], Any]:
        """Defaults that depend on other fields: (section, key) -> value. A record applies them in :meth:`check`."""
        return {}


def _with_class_names(value: Any) -> Any:
    """``value`` with each class replaced by its dotted path, which is how a pattern names it."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple):
        return tuple(_with_class_names(item) if isinstance(item, type) else item for item in value)
    if isinstance(value, dict):
        return {_with_class_names(key) if isinstance(key, type) else key: item for key, item in value.items()}
    return value
