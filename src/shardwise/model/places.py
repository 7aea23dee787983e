"""Places outside of modules that hold values between calls: dicts, classes, names in namespaces, caches of functions, generators."""

import ctypes
import functools
import gc
import io
import operator
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from shardwise.errors import UnsupportedError
from shardwise.model.iterators import is_iterator
from shardwise.model.mutable import changed_values, content_of, is_mutable, is_of_python, put

LONGEST = 1000  # items of a container that are looked at one by one
_LARGEST = 1 << 20  # bytes of an array
_ABSENT = object()
_OPAQUE = frozenset(
    {"torch", "shardwise", "builtins", "numpy", "sympy", "mpmath", "einops", "einx", "triton", "filelock", "networkx"}
)
_FILES = (io.StringIO, io.BytesIO)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


@functools.cache
def is_opaque(module: Any) -> bool:
    """Whether code of a module, by its name, keeps nothing that a forward of a user's would. Classes made in C may have no name of
    theirs, and are."""
    root = module.partition(".")[0] if isinstance(module, str) else "builtins"
    return root != "__main__" and (root in _OPAQUE or is_of_python(root))


def is_cache(value: Any) -> bool:
    """Whether a function is one of ``functools.lru_cache``."""
    return hasattr(type(value), "cache_info") and hasattr(value, "__wrapped__")


def is_place(value: Any) -> bool:
    """Whether a value may hold something else later. Large arrays are data."""
    if type(value).__name__ == "ndarray" and value.nbytes > _LARGEST:
        return False
    if isinstance(value, (*_WEAK, *_FILES, threading.local)) or _is_of_numbers(type(value)):
        return True
    return is_mutable(value) or is_iterator(type(value))


@functools.cache
def _is_of_numbers(kind: type) -> bool:
    """Whether a class of ``ctypes`` has numbers only: what a pointer leads to may be gone later."""
    if issubclass(kind, ctypes.Structure | ctypes.Union):
        return all(_is_of_numbers(field[1]) for field in getattr(kind, "_fields_", ()))
    if issubclass(kind, ctypes.Array):
        return _is_of_numbers(kind._type_)
    return issubclass(kind, ctypes._SimpleCData) and str(getattr(kind, "_type_", "P")) in "bBhHiIlLqQfdg?cu"


class Key:
    """A name in a namespace, of which other names are left alone."""

    def __init__(self, space: dict[str, Any], name: str):
        self.space, self.name = space, name

    def __hash__(self) -> int:
        return hash((id(self.space), self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.space is other.space and self.name == other.name


class Space:
    """All names of a module, or all attributes of a class or a function, but for those that begin with two underscores."""

    def __init__(self, home: Any):
        self.home = home

    def content(self) -> dict[str, Any]:
        names = self.home if isinstance(self.home, dict) else vars(self.home)
        return {name: value for name, value in names.items() if name[:2] != "__"}

    def put(self, content: dict[str, Any]) -> None:
        now = self.content()
        for name, value in now.items():  # what was imported stays, which Python does once
            if name not in content and not isinstance(value, types.ModuleType):
                self.home.pop(name) if isinstance(self.home, dict) else delattr(self.home, name)
        for name, value in content.items():
            if now.get(name, _ABSENT) is not value:
                self.home.update({name: value}) if isinstance(self.home, dict) else setattr(self.home, name, value)


class Environment(Space):
    """The variables of the process's environment."""

    def __init__(self) -> None:
        super().__init__(os.environ)
        self._texts: dict[str, str] = {}

    def content(self) -> dict[str, str]:
        """The same text objects for a variable that has a value again."""
        kept = self._texts.setdefault
        return {kept(name, name): kept(f"{name}={value}", value) for name, value in os.environ.items()}

    def put(self, content: dict[str, str]) -> None:
        for name in os.environ.keys() - content.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in content.items() if os.environ.get(name) != value})


class Place:
    """What a place holds now.

    Args:
        name: for messages.
        part: the place.

    Attributes:
        content: a shallow copy of what it holds.
    """

    __slots__ = ("_look", "_mark", "content", "name", "part")

    def __init__(self, name: str, part: Any):
        self.name, self.part, self.content = name, part, _content(part)
        look = _mark_of_class if isinstance(part, type) else _MARKS.get(type(part), _mark)
        is_long = isinstance(part, dict | list | set | deque) and len(part) > LONGEST
        self._look: Callable[[Any], Any] = len if is_long else look
        self._mark = self._look(part)

    @property
    def is_same(self) -> bool:
        now, before = self._look(self.part), self._mark
        if type(now) is tuple and type(before) is tuple:
            return len(now) == len(before) and all(map(operator.is_, now, before))
        return bool(now == before)

    @property
    def new_values(self) -> list[Any]:
        return changed_values(_content(self.part), self.content)

    def restore(self) -> None:
        part, content = self.part, self.content
        if isinstance(part, Space):
            part.put(content)
        elif isinstance(part, Key):
            part.space.update(content)
            if not content:
                part.space.pop(part.name, None)
        elif isinstance(part, type):
            _put_into_class(part, content)
        elif is_cache(part):
            if (table := _table(part)) is None:
                part.cache_clear()
            else:
                put(table, content)
        elif isinstance(part, _WEAK):
            put(part.data, content)  # type: ignore[attr-defined]
        elif isinstance(part, _FILES):
            part.seek(0)
            part.truncate()
            part.write(content[0])
            part.seek(content[1])
        elif _is_of_numbers(type(part)):
            ctypes.memmove(ctypes.addressof(part), bytes(content), len(content))
        elif is_iterator(type(part)):
            raise moves_on(self.name, f"a {type(part).__name__}")
        else:
            put(vars(part) if isinstance(part, threading.local) else part, content)


def moves_on(name: str, what: str) -> UnsupportedError:
    """The error for a place that cannot be put back."""
    return UnsupportedError(
        f"{what} outside of the model, which a forward changes",
        why="the model is run before training, to see what it does, and this cannot be put back",
        fix="keep what a forward counts, or draws from, in an attribute of a module, as a number or a list",
        name=name,
    )


def _content(part: Any) -> Any:
    """A shallow copy of what a place holds."""
    if isinstance(part, Space):
        return part.content()
    if isinstance(part, Key):
        return {part.name: part.space[part.name]} if part.name in part.space else {}
    if isinstance(part, type | threading.local):
        return dict(vars(part))
    if is_cache(part):
        return _bytes(part.cache_info().misses) if (table := _table(part)) is None else dict(table)
    if isinstance(part, _WEAK):
        return part.data.copy()  # type: ignore[attr-defined]
    if isinstance(part, _FILES):
        return ["", 0] if part.closed else [part.getvalue(), part.tell()]
    if _is_of_numbers(type(part)):
        return bytearray(part)
    if isinstance(part, types.GeneratorType):
        frame = part.gi_frame
        return _bytes(None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values())))
    return _bytes(part, operator.length_hint(part, -1)) if is_iterator(type(part)) else content_of(part)


def _table(cache: Any) -> dict[Any, Any] | None:
    """The results that a cache without a limit holds, which may be more than can be computed again; None of one with a limit."""
    if cache.cache_parameters()["maxsize"] is not None:
        return None
    tables = [each for each in gc.get_referents(cache) if type(each) is dict and each is not vars(cache)]
    return tables[0] if len(tables) == 1 else None


def _put_into_class(cls: type, content: dict[str, Any]) -> None:
    for key in vars(cls).keys() - content.keys():
        delattr(cls, key)
    for key, value in content.items():
        if vars(cls).get(key, _ABSENT) is not value:
            setattr(cls, key, value)


def _bytes(*values: Any) -> bytearray:
    """Something that is equal where ``values`` are written equally."""
    return bytearray(repr(values).encode())


# ---- marks: other ones where what is held has changed, and fast, as there are hundreds of places and a run is short. The objects
# themselves, in a tuple, are compared by identity: their numbers, which id() gives, would be an event of the audit hook each. -----------


def _mark_of_dict(part: dict[Any, Any]) -> tuple[Any, ...]:
    return (*part, *part.values())


def _mark_of_class(part: type) -> tuple[Any, ...]:
    return tuple(vars(part).values())


def _mark_of_key(part: Key) -> tuple[Any]:
    return (part.space.get(part.name, _ABSENT),)


def _mark(part: Any) -> Any:
    content = _content(part)
    if isinstance(content, dict):
        return _mark_of_dict(content)
    return tuple(content) if isinstance(content, list | set) else bytes(content)


_MARKS: dict[type, Callable[[Any], Any]] = {
    dict: _mark_of_dict,
    list: tuple,
    set: tuple,
    Key: _mark_of_key,
    io.StringIO: _content,
    io.BytesIO: _content,
}
