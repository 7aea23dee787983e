"""Reads pickles without executing them: torch files and the metadata of a DCP directory are pickles.

A pickle is a program that names functions to call, and Python's own reader calls them. This one calls nothing at all.
Its stack contains numbers, texts, lists and mappings; where a function would be called, it puts a :class:`Made`: which
function, with which arguments. The reader of a format then looks for the few that it knows. A name that the format does
not allow ends the reading at once.
"""

import pickletools
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardwise.errors import CheckpointError

__all__ = ["Global", "Made", "Ordered", "Persistent", "read_pickle", "shown"]

MAX_BYTES = 1 << 30  # the metadata of 10^6 chunks takes a tenth of this
MAX_INT_BYTES = 16


class Ordered(dict[Any, Any]):
    """An OrderedDict; ``attributes``: what it has beside its entries, as torch's state dicts have ``_metadata``."""

    attributes: Any = None


@dataclass(frozen=True)
class Global:
    """A function or class that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False)  # compared and hashed by identity: two may be keys of a mapping
class Made:
    """Stands for the result of calling ``function`` with ``args``; ``state``: what ``__setstate__`` would get."""

    function: Global
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, eq=False)
class Persistent:
    """An object outside the pickle, by its persistent id: in torch files, a storage."""

    id: Any


def read_pickle(data: bytes, place: str, allowed: Callable[[Global], bool]) -> Any:
    """Reads the value of a pickle: plain values, :class:`Made`, :class:`Persistent` and :class:`Global`.

    An ``OrderedDict`` or ``defaultdict`` becomes a ``dict``, a set a list. Values may be shared, and may contain
    themselves: code that walks through them must limit the number of steps.

    Args:
        data: the pickle.
        place: its name in messages ("model.pt: data.pkl").
        allowed: whether a name may occur.

    Raises:
        CheckpointError: a name that is not allowed, an opcode that no pickle of weights needs, or one that cannot be
            read; nothing was executed.
    """
    if len(data) > MAX_BYTES:
        raise _damaged(place, f"a pickle of {len(data)} bytes", f"at most {MAX_BYTES} are read")
    machine = _Machine(place, allowed, len(data))
    end: int | None = None
    try:
        for opcode, argument, position in pickletools.genops(data):
            step = _STEPS.get(opcode.name)
            if step is None:
                raise CheckpointError(
                    f"{place}: the opcode {opcode.name} at byte {position}",
                    why="no pickle of weights needs it, so nothing of it was run",
                    fix="do not trust this file; if it is yours, save the model's state_dict() again",
                )
            step(machine, argument)
            end = position
        if end is None or end + 1 != len(data):
            raise _damaged(place, f"a pickle of {len(data)} bytes", "it ends before they do")
    except CheckpointError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise _damaged(place, "a pickle", f"it cannot be read: {type(error).__name__}: {error}"[:300]) from error
    return machine.result()


def shown(value: Any) -> str:
    """A value as text for a message, shortened: shared parts are stored once, but would be printed each time, without
    end."""
    if isinstance(value, Global | Made):
        return str(value if isinstance(value, Global) else value.function)[:120]
    return _SHORT.repr(value)


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, place: str, allowed: Callable[[Global], bool], num_bytes: int):
        self.place, self.allowed, self.num_bytes = place, allowed, num_bytes
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise _damaged(self.place, "a pickle", f"{len(self.stack)} values are left at its end, which must be one")
        return self.stack[0]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        # Values below a mark belong to the object around it.
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            raise ValueError("it takes a value that is not there")
        return self.stack.pop()

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def to_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("it takes a mark that is not there")
        mark = self.marks.pop()
        values, self.stack[mark:] = self.stack[mark:], []
        return values

    def take(self, count: int) -> tuple[Any, ...]:
        return tuple(self.pop() for _ in range(count))[::-1]

    # ---- the steps that do more than push a value

    def keep(self, index: int) -> None:
        if index > self.num_bytes:
            raise ValueError(f"memo {index} in a pickle of {self.num_bytes} bytes")
        self.memo[index] = self.top()

    def extend(self, values: Iterable[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise ValueError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Hashing a nested tuple can take for ever: shared parts are stored once, but hashed each time.
            if not isinstance(key, str | int | float | bytes | Made | None):
                raise ValueError(f"a {type(key).__name__} as a key")
            if key in target:
                raise ValueError(f"the key {shown(key)} twice")
            target[key] = value

    def named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is no text")
        found = Global(module, name)
        if not self.allowed(found):
            if found.module.startswith("torch.distributed"):
                raise CheckpointError(
                    f"{self.place}: {shown(found)}",
                    why="torch.save was given sharded tensors, of which this file has one rank's shards",
                    fix="sw.save_weights(model, folder) or torch.distributed.checkpoint on every rank, or torch.save what "
                    "sw.full_state_dict(model) gives",
                )
            raise CheckpointError(
                f"{self.place}: it calls {shown(found)}",
                why="a file of weights has no use for that, so nothing of it was run",
                fix="do not trust this file; if it is yours, save the model's state_dict() alone, or as safetensors",
            )
        self.push(found)

    def call(self) -> None:
        args, function = self.pop(), self.pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise ValueError("it calls what is not a name")
        plain = str(function) in ("collections.OrderedDict", "collections.defaultdict")
        if plain and any(not isinstance(value, Global) for value in args):
            raise ValueError(f"{function} with arguments")
        self.push(Ordered() if plain else Made(function, args))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, Ordered):
            target.attributes = state
        if isinstance(target, dict):
            return
        if not isinstance(target, Made) or target.state is not None:
            raise ValueError(f"it fills a {type(target).__name__}")
        target.state = state


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother, _SHORT.maxstring = 2, 80, 80


def _stop(machine: _Machine, argument: Any) -> None:
    return


def _integer(machine: _Machine, value: int) -> None:
    if value.bit_length() > 8 * MAX_INT_BYTES:
        raise ValueError(f"a number of {value.bit_length()} bits")
    machine.push(value)


# The opcodes that Python's pickler writes in protocols 2 to 5 for the values that occur in weights. Left out: those
# that call in another way (INST, OBJ, NEWOBJ_EX), refer outside the pickle (EXT1..., NEXT_BUFFER, PERSID), or exist
# only in the oldest protocols.
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _stop,
    "FRAME": _stop,
    "STOP": _stop,
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), _integer),
    **dict.fromkeys(
        ("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        lambda m, value: m.push(value),
    ),
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE1": lambda m, _: m.push(m.take(1)),
    "TUPLE2": lambda m, _: m.push(m.take(2)),
    "TUPLE3": lambda m, _: m.push(m.take(3)),
    "TUPLE": lambda m, _: m.push(tuple(m.to_mark())),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "APPEND": lambda m, _: m.extend(m.take(1)),
    "APPENDS": lambda m, _: m.extend(m.to_mark()),
    "EMPTY_SET": lambda m, _: m.push([]),
    "ADDITEMS": lambda m, _: m.extend(m.to_mark()),
    "FROZENSET": lambda m, _: m.push(m.to_mark()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "SETITEM": lambda m, _: m.set_items(list(m.take(2))),
    "SETITEMS": lambda m, _: m.set_items(m.to_mark()),
    "BINPUT": lambda m, index: m.keep(index),
    "LONG_BINPUT": lambda m, index: m.keep(index),
    "MEMOIZE": lambda m, _: m.keep(len(m.memo)),
    "BINGET": lambda m, index: m.push(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.push(m.memo[index]),
    "GLOBAL": lambda m, name: m.named(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.named(*m.take(2)),
    "REDUCE": lambda m, _: m.call(),
    "NEWOBJ": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.push(Persistent(m.pop())),
}


def _damaged(place: str, given: str, why: str) -> CheckpointError:
    return CheckpointError(f"{place}: {given}", why=why, fix="copy the file again, or save it again: it is damaged")
