"""A file of tokens, written once and memory-mapped ever after: its tokens in one row, a few arrays, and an index that says what
is where and what it was made from.

::

    name and version | tokens | arrays | index, as JSON | length and CRC-32 of the index, name

The index is written last and found from the end, so that tokens go to disk as they come. A file that is cut off, of another
version, or whose index or arrays have changed is not opened. The tokens themselves have no checksum: reading all of them would
take as long as an epoch.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

__all__ = ["Produce", "StoredTokens", "in_memory", "open_tokens", "write_tokens"]

_NAME = b"shardwise tokens, version 1".ljust(32)
_END = struct.Struct("<QI32s")
_BUFFER = 1 << 20

Produce = Callable[[Callable[[np.ndarray], object]], tuple[dict[str, np.ndarray], dict[str, Any]]]
"""Calls its argument with tokens, as they come; returns the arrays and facts (as JSON has them) that belong to them."""


@dataclass(frozen=True)
class StoredTokens:
    """Tokens and what belongs to them.

    Attributes:
        tokens: all in one row, memory-mapped where they are from a file.
        arrays: by name.
        facts: what else the maker said.
        path: of the file; None: they are in memory.
    """

    tokens: np.ndarray
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def in_memory(produce: Produce, dtype: type[np.generic]) -> StoredTokens:
    """The tokens that ``produce`` makes, without a file."""
    parts: list[np.ndarray] = []
    arrays, facts = produce(lambda tokens: parts.append(tokens.astype(dtype, copy=False)))
    return StoredTokens(np.concatenate(parts) if parts else np.zeros(0, dtype), arrays, facts)


def write_tokens(file: BinaryIO, produce: Produce, dtype: type[np.generic], inputs: Mapping[str, Any]) -> None:
    """Writes the tokens that ``produce`` makes to ``file``, which was opened for writing.

    Args:
        file: is empty.
        produce: raises what it will; the file is of no use then.
        dtype: of the tokens.
        inputs: what they are made from, as JSON has it; :func:`open_tokens` compares it.

    Raises:
        OSError: it cannot be written.
    """
    file.write(_NAME)
    num = 0

    def add(tokens: np.ndarray) -> None:
        nonlocal num
        num += len(tokens)
        file.write(np.ascontiguousarray(tokens, dtype=dtype).data)

    arrays, facts = produce(add)
    places = {"": {"dtype": np.dtype(dtype).str, "at": len(_NAME), "num": num, "crc": None}}
    for name, array in arrays.items():
        file.write(bytes(-file.tell() % 16))
        data = np.ascontiguousarray(array).data
        places[name] = {"dtype": array.dtype.str, "at": file.tell(), "num": len(array), "crc": zlib.crc32(data)}
        file.write(data)
    index = json.dumps({"inputs": inputs, "facts": facts, "places": places, "at": file.tell()}).encode()
    file.write(index)
    file.write(_END.pack(len(index), zlib.crc32(index), _NAME))
    file.flush()
    os.fsync(file.fileno())  # else a machine that loses power may keep the name and lose the content


def open_tokens(path: Path, inputs: Mapping[str, Any]) -> StoredTokens | None:
    """The tokens in a file; None where there is no such file, it is damaged, or was made from something else.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(_NAME) + _END.size or file.read(len(_NAME)) != _NAME:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    length, crc, name = _END.unpack_from(mapped, size - _END.size)
    begin = size - _END.size - length
    if name != _NAME or begin < len(_NAME) or zlib.crc32(mapped[begin : begin + length]) != crc:
        return None
    index = json.loads(mapped[begin : begin + length])
    if index["inputs"] != json.loads(json.dumps(inputs)) or index["at"] != begin:
        return None
    arrays: dict[str, np.ndarray] = {}
    for key, place in index["places"].items():
        arrays[key] = np.frombuffer(mapped, place["dtype"], place["num"], place["at"])
        if place["crc"] is not None and zlib.crc32(arrays[key].data) != place["crc"]:
            return None
    return StoredTokens(arrays.pop(""), arrays, index["facts"], path)
