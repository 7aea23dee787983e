"""Writes pickles from records, the reverse of what reads them.

So files for torch are written without the objects themselves: the description of a tensor without a tensor, private
classes of torch without importing them.
"""

import struct
from dataclasses import dataclass
from typing import Any

__all__ = ["ORDERED_DICT", "Global", "Made", "Persistent", "pickled"]


@dataclass(frozen=True)
class Global:
    """A function or class that a pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """Stands for the result of calling ``function`` with ``args``; ``state``: what ``__setstate__`` gets."""

    function: Global
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, eq=False)
class Persistent:
    """An object outside the pickle, by its persistent id."""

    id: Any


ORDERED_DICT = Global("collections", "OrderedDict")


def pickled(value: Any) -> bytes:
    """Pickles a value of dicts, lists, tuples, texts, numbers, bool, None, and the records of the reader, in protocol
    2.

    A :class:`Made` with a state is made empty and filled (``NEWOBJ``, ``BUILD``), one without is a call (``REDUCE``).
    """
    out = bytearray(b"\x80\x02")
    _write(value, out, {})
    return bytes(out + b".")


def _write(value: Any, out: bytearray, memo: dict[Any, int]) -> None:
    match value:
        case None:
            out += b"N"
        case bool():
            out += b"\x88" if value else b"\x89"
        case int():
            _write_int(value, out)
        case str():
            if not _recalled(value, out, memo):
                text = value.encode()
                out += b"X" + struct.pack("<I", len(text)) + text
                _keep(value, out, memo)
        case Global():
            if not _recalled(value, out, memo):
                out += f"c{value.module}\n{value.name}\n".encode()
                _keep(value, out, memo)
        case tuple():
            _write_all(value, out, memo)
            out += b"t"
        case list():
            out += b"]"
            _write_all(value, out, memo)
            out += b"e"
        case dict():
            out += b"}"
            _write_all([part for item in value.items() for part in item], out, memo)
            out += b"u"
        case Persistent():
            _write(value.id, out, memo)
            out += b"Q"
        case Made():
            _write(value.function, out, memo)
            _write(value.args, out, memo)
            out += b"R" if value.state is None else b"\x81"
            if value.state is not None:
                _write(value.state, out, memo)
                out += b"b"
        case _:
            raise TypeError(f"a {type(value).__name__} is not written")


def _write_all(values: Any, out: bytearray, memo: dict[Any, int]) -> None:
    out += b"("
    for value in values:
        _write(value, out, memo)


def _write_int(value: int, out: bytearray) -> None:
    if 0 <= value < 1 << 8:
        out += b"K" + struct.pack("<B", value)
    elif -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + struct.pack("<B", len(data)) + data


def _recalled(value: Any, out: bytearray, memo: dict[Any, int]) -> bool:
    if value in memo:
        out += b"j" + struct.pack("<I", memo[value])
    return value in memo


def _keep(value: Any, out: bytearray, memo: dict[Any, int]) -> None:
    memo[value] = len(memo)
    out += b"r" + struct.pack("<I", memo[value])
