"""A file of tokens, written once and memory-mapped ever after: its tokens in one row, a few arrays, and an index that says what
is where and what it was made from.

::

    name and version | tokens | arrays | index, as JSON | length and CRC-32C of the index, name

The index is written last and found from the end, so that tokens go to disk as they come. It has a CRC-32C of the tokens and of each
array. All of the tokens are checked when a file is opened, not each block at its first read: only then can they be made anew, and a
damage that is found in the middle of an epoch would end a run of hours. It takes as long as reading the file: 0.1 s for a gigabyte in
memory, as long as the disk takes for one that is larger.
"""

import json
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from crc32c import crc32c

_KIND = b"shardwise tokens, version "
_NAME = (_KIND + b"2").ljust(32)
_END = struct.Struct("<QI32s")
_BUFFER = 1 << 20

Produce = Callable[[Callable[..., object]], tuple[dict[str, np.ndarray], dict[str, Any]]]
"""Calls its argument with tokens, as they come, and the share of the source that was read by then (0 to 1; left out: not known);
returns the arrays and facts (as JSON has them) that belong to them."""


class ChangedTokensError(Exception):
    """A file of tokens is not as it was written. The text says how."""


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
    arrays, facts = produce(lambda tokens, share=None: parts.append(tokens.astype(dtype, copy=False)))
    return StoredTokens(np.concatenate(parts) if parts else np.zeros(0, dtype), arrays, facts)


def write_tokens(file: BinaryIO, produce: Produce, dtype: type[np.generic], inputs: Mapping[str, Any]) -> None:
    """Writes the tokens that ``produce`` makes to ``file``, which was opened for writing.

    Args:
        file: is empty.
        produce: raises what it will; the file is of no use then.
        dtype: of the tokens.
        inputs: what they are made from, as JSON has it; :func:`open_tokens` compares it.
    """
    file.write(_NAME)
    num = crc = 0

    def add(tokens: np.ndarray, share: float | None = None) -> None:
        nonlocal num, crc
        data = np.ascontiguousarray(tokens, dtype=dtype).data
        num, crc = num + len(tokens), crc32c(data, crc)
        file.write(data)

    arrays, facts = produce(add)
    places = {"": {"dtype": np.dtype(dtype).str, "at": len(_NAME), "num": num, "crc": crc}}
    for name, array in arrays.items():
        file.write(bytes(-file.tell() % 16))
        data = np.ascontiguousarray(array).data
        places[name] = {"dtype": array.dtype.str, "at": file.tell(), "num": len(array), "crc": crc32c(data)}
        file.write(data)
    index = json.dumps({"inputs": inputs, "facts": facts, "places": places, "at": file.tell()}).encode()
    file.write(index)
    file.write(_END.pack(len(index), crc32c(index), _NAME))


def open_tokens(
    path: Path, inputs: Mapping[str, Any], check: Callable[[float], object] | None = None
) -> StoredTokens | None:
    """The tokens in a file; None where there is no such file, it is of another version, or was made from something else.

    Args:
        path: of the file.
        inputs: what the tokens are to be made from.
        check: the tokens are read and compared with their checksum, as arrays and index always are; it is called with the share
            that is done. None: they are not.

    Raises:
        ChangedTokensError: it is not as it was written.
        OSError: the file cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        name = file.read(len(_NAME))
        if name != _NAME:
            if name.startswith(_KIND):
                return None
            raise ChangedTokensError("it does not begin as a file of tokens does")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        index = _index(mapped)
        if index["inputs"] != json.loads(json.dumps(inputs)):
            return None
        arrays: dict[str, np.ndarray] = {}
        for key, place in index["places"].items():
            arrays[key] = np.frombuffer(mapped, place["dtype"], place["num"], place["at"])
            if key and crc32c(arrays[key].data) != place["crc"]:
                raise ChangedTokensError(f"its array {key} has changed")
        tokens = arrays.pop("")
        if (
            check is not None
            and _sum(file, index["places"][""]["at"], tokens.nbytes, check) != index["places"][""]["crc"]
        ):
            raise ChangedTokensError("its tokens have changed")
    return StoredTokens(tokens, arrays, index["facts"], path)


def _index(mapped: mmap.mmap) -> dict[str, Any]:
    last = len(mapped) - _END.size
    length, crc, name = _END.unpack_from(mapped, last) if last >= len(_NAME) else (0, 0, b"")
    begin = last - length
    if name != _NAME or begin < len(_NAME):
        raise ChangedTokensError("it does not end as a file of tokens does")
    if crc32c(mapped[begin:last]) != crc:
        raise ChangedTokensError("its index has changed")
    index = json.loads(mapped[begin:last])
    if index["at"] != begin:
        raise ChangedTokensError(f"{begin} bytes are before its index, and {index['at']} were written")
    return index


def _sum(file: BinaryIO, at: int, size: int, told: Callable[[float], object]) -> int:
    """The checksum of a part of a file. It is read, not mapped: the system reads ahead more of it."""
    buffer, done, crc = memoryview(bytearray(_BUFFER)), 0, 0
    file.seek(at)
    while done < size and (num := file.readinto(buffer[: size - done])):  # type: ignore[attr-defined]
        crc, done = crc32c(buffer[:num], crc), done + num
        told(done / size)
    return crc
