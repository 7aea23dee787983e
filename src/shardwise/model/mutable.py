"""What values that may change hold: containers, arrays and objects of a user's classes; shown, compared, and put back."""

import sys
import sysconfig
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_OPAQUE = frozenset({"torch", "shardwise", "builtins"})
# Python's classes that hold a user's values: Namespace, UserDict, Queue.
_PLAIN = frozenset({"argparse", "collections", "queue"})
_STDLIB = sysconfig.get_path("stdlib")
FUNCTIONS = frozenset({types.FunctionType, types.MethodType})
ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type}) | FUNCTIONS


def is_mutable(value: Any) -> bool:
    """Whether a value is a container, an array or an object of a user's class: a part, which may hold something else later."""
    if isinstance(value, dict | list | set | deque | bytearray | array | types.SimpleNamespace | types.CellType):
        return True
    kind = type(value)
    home = str(kind.__module__).partition(".")[0]
    if home == "numpy":
        return kind.__name__ == "ndarray"
    if home in _PLAIN:
        return isinstance(getattr(value, "__dict__", None), dict)
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType) or home in _OPAQUE:
        return False
    if is_of_python(home):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots(kind))


@cache
def is_of_python(name: str) -> bool:
    """Whether a module is one of Python's own, and not a user's of the same name."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.stdlib_module_names and (file is None or Path(file).is_relative_to(_STDLIB))


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """The attributes that objects of a class keep in slots, as those of a dataclass with ``slots=True``."""
    named = [vars(cls).get("__slots__", ()) for cls in kind.__mro__]
    names = [name for each in named for name in ((each,) if isinstance(each, str) else each)]
    return tuple(name for name in names if isinstance(getattr(kind, name, None), types.MemberDescriptorType))


def _attributes_of(part: Any) -> dict[str, Any]:
    slots = {name: getattr(part, name) for name in _slots(type(part)) if hasattr(part, name)}
    return {**getattr(part, "__dict__", {}), **slots}


def content_of(part: Any) -> Any:
    if isinstance(part, dict):
        return dict(dict.items(part))  # not what a class of its own would give
    if isinstance(part, list | deque):
        return list(part)
    if isinstance(part, set):
        return set(part)
    if isinstance(part, bytearray | array):
        return part[:]
    if isinstance(part, types.CellType):
        return [part.cell_contents] if _is_filled(part) else []
    return part.copy() if type(part).__module__ == "numpy" else _attributes_of(part)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def items_of(content: Any) -> Collection[Any]:
    if isinstance(content, dict):
        return content.values()
    return content if isinstance(content, list | set) else ()


def is_same(now: Any, before: Any) -> bool:
    """Whether a part has the same content: the same objects, or equal bytes and numbers."""
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is value for key, value in before.items())
    if isinstance(now, list):
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if isinstance(now, set | bytearray | array):
        return now == before
    return now.shape == before.shape and now.tobytes() == before.tobytes()


def changed_values(now: Any, before: Any) -> list[Any]:
    """The values in the content of a part that were not in it before."""
    if isinstance(now, dict):
        return [value for key, value in now.items() if key not in before or before[key] is not value]
    if isinstance(now, list | set) and not is_same(now, before):
        known = set(map(id, before))
        return [value for value in now if id(value) not in known]
    if isinstance(now, array):
        return [] if is_same(now, before) else list(now)
    return [now] if type(now).__module__ == "numpy" and not is_same(now, before) else []


def put(part: Any, content: Any) -> None:
    """Makes a part hold what :func:`content_of` has shown."""
    if isinstance(part, dict):
        kind: Any = OrderedDict if isinstance(part, OrderedDict) else dict  # not what a class of its own would do
        kind.clear(part)
        for key, value in content.items():
            kind.__setitem__(part, key, value)
    elif isinstance(part, set):
        part.clear()
        part.update(content)
    elif isinstance(part, types.CellType):
        if content:
            part.cell_contents = content[0]
    elif isinstance(part, list | bytearray | array):
        part[:] = content
    elif isinstance(part, deque):
        part.clear()
        part.extend(content)
    elif type(part).__module__ == "numpy":
        part[...] = content
    else:
        for name in _attributes_of(part).keys() - content.keys():
            object.__delattr__(part, name)
        for name, value in content.items():
            object.__setattr__(part, name, value)  # as a frozen dataclass refuses setattr
