"""Reads pickles with Python's own unpickler, restricted: torch files and the metadata of a DCP directory are pickles.

A pickle is a program that names functions to call. Here a name leads to a stand-in of the format's reader, most often a
:class:`Named`, which does nothing but keep what it was called with. A name that the format does not have ends the
reading at once. ``torch.load(weights_only=True)`` runs no code either, but a file of 300 bytes stops it
for ever: a tuple that contains itself many times over, as the key of a mapping, is hashed. For the same reason this is
the unpickler in Python, whose steps can be replaced, and not the one in C.
"""

import io
import pickle
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from shardwise.errors import CheckpointError
from shardwise.state.formats.checks import damaged

MAX_BYTES = 1 << 30  # the metadata of 10^6 chunks takes a tenth of this
# What Python's pickler writes in protocols 2 to 5 for the values that occur in weights.
_OPCODES = (
    "PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "MARK", "EMPTY_TUPLE",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "BINPUT", "LONG_BINPUT",
    "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BINPERSID",
)  # fmt: skip


class Named:
    """Stands for the result of calling what a pickle names; the class itself stands for the name.

    Attributes:
        args: what it was called with.
        state: what ``__setstate__`` was given.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> "Named":
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Ordered(dict[Any, Any]):
    """An OrderedDict; ``attributes``: what it has beside its entries, as torch's state dicts have ``_metadata``."""

    attributes: Any = None

    def __init__(self, *args: Any):
        if any(name_of(value) is None for value in args):  # a defaultdict has the type of its values
            raise ValueError("a mapping with arguments")

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


@dataclass(frozen=True, eq=False)
class Persistent:
    """An object outside the pickle, by its persistent id: in torch files, a storage."""

    id: Any


def named(name: str) -> type[Named]:
    """What stands for ``name``, which has its module in front."""
    return type("Named", (Named,), {"name": name})


def name_of(value: Any) -> str | None:
    """The module and name that ``value`` stands for; None: it is no name."""
    return value.name if isinstance(value, type) and issubclass(value, Named) else None


def read_pickle(data: bytes, place: str, stand_in: Callable[[str], Any]) -> Any:
    """Reads the value of a pickle: plain values, what stand-ins return, :class:`Persistent`; mappings are a ``dict``.

    Values may be shared, and may contain themselves: code that walks through them must limit the number of steps.

    Args:
        place: its name in messages ("model.pt: data.pkl").
        stand_in: what is called in place of a name with its module; None: it must not occur.

    Raises:
        CheckpointError: a name that is not allowed, an opcode that no pickle of weights needs, or one that cannot be
            read; nothing was executed.
    """
    if len(data) > MAX_BYTES:
        raise damaged(place, f"a pickle of {len(data)} bytes", f"at most {MAX_BYTES} are read")
    file = io.BytesIO(data)
    reader = _Reader(file, place, stand_in)
    try:
        value = reader.load()
        if reader.stack or reader.metastack or file.tell() != len(data) or max(reader.memo, default=0) > len(data):
            raise ValueError("something is left at its end, or was kept at a place that no pickler chooses")
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle does to the unpickler
        raise damaged(place, "a pickle", f"it cannot be read: {type(error).__name__}: {error}"[:300]) from error
    return value


def shown(value: Any) -> str:
    """A value as text for a message, shortened: shared parts are stored once, but would be printed each time, without
    end."""
    if isinstance(value, Named) or name_of(value) is not None:
        return value.name[:120]
    return _SHORT.repr(value)


class _Reader(pickle._Unpickler):
    stack: list[Any]
    metastack: list[Any]
    memo: dict[int, Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES)
    }

    def __init__(self, file: io.BytesIO, place: str, stand_in: Callable[[str], Any]):
        super().__init__(file)
        self._place, self._stand_in = place, stand_in

    def persistent_load(self, pid: Any) -> Persistent:
        return Persistent(pid)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in ("__builtin__.getattr", "builtins.getattr"):
            return _member
        found = Ordered if full in ("collections.OrderedDict", "collections.defaultdict") else self._stand_in(full)
        if found is None:
            if module.startswith("torch.distributed"):
                raise CheckpointError(
                    f"{self._place}: {full[:120]}",
                    why="torch.save was given sharded tensors, of which this file has one rank's shards",
                    fix="sw.save_weights(model, folder) on every rank, or torch.save what sw.full_state_dict(model) gives",
                )
            raise CheckpointError(
                f"{self._place}: it calls {full[:120]}",
                why="a file of weights has no use for that, so nothing of it was run",
                fix="do not trust this file; if it is yours, save the model's state_dict() alone, or as safetensors",
            )
        return found

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], Named | Ordered):  # a stand-in itself must stay as it is
            raise ValueError(f"it fills a {type(self.stack[-2]).__name__}")
        cast("Any", super()).load_build()

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int | float | bytes | Named | None):
                raise ValueError(f"a {type(key).__name__} as a key")
            if key in target:
                raise ValueError(f"the key {shown(key)} twice")
            target[key] = value

    dispatch |= {pickle.BUILD[0]: load_build, pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}


def _member(owner: Any, name: Any) -> Named:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle by its name, and others by its value."""
    if name_of(owner) is None or not isinstance(name, str):
        raise ValueError("an attribute of what is no enumeration")
    return owner(name)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother, _SHORT.maxstring = 2, 80, 80
