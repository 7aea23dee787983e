"""Plans a file for ``torch.load(weights_only=True)``, also with ``mmap=True``.

``torch.save`` lays it out without values (``torch.serialization.skip_data``); the checksums of the values, which torch
leaves at 0, are filled in when they are known.
"""

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.model import dtype_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import whole
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed, Piece

_NORESERVE = 0x4000  # MAP_NORESERVE of linux/mman.h, which mmap names in newer versions of Python
_ENTRY, _END, _END_64 = (
    b"PK\x01\x02",
    22,
    20 + 56,
)  # an entry of the list of records; bytes of the records behind the list


def plan_torch_file(facts: Mapping[str, Fact], file: str, ties: Mapping[str, str]) -> ConversionPlan:
    """Plans one torch file with all tensors.

    Args:
        ties: name -> the earlier name whose storage it shares.
    """
    own = {name: fact for name, fact in facts.items() if name not in ties}
    tensors = without_values(own)
    layout = Layout({name: tensors[ties.get(name, name)] for name in facts})
    written = [(name, fact) for name, fact in own.items() if fact.num_bytes]
    pieces = [
        Piece(name, whole(fact.shape), fact.dtype, file, begin)
        for (name, fact), begin in zip(written, layout.begins, strict=True)
    ]

    def finish(sums: Sequence[int]) -> list[Fixed]:
        return [Fixed(file, at, data) for at, data in layout.parts(sums)]

    return ConversionPlan({file: layout.tell()}, tuple(pieces), finish, summed=True)


def without_values(facts: Mapping[str, Fact]) -> dict[str, Tensor]:
    """Tensors of those shapes and dtypes, of memory that nothing is written to, so that none of it is taken."""
    places, end = {}, 1
    for name, fact in facts.items():
        places[name] = end + -end % 64
        end = places[name] + fact.num_bytes
    room = mmap.mmap(-1, end, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)

    def tensor(name: str, fact: Fact) -> Tensor:
        dtype, numel = dtype_of(fact.dtype), fact.num_bytes // DTYPE_BYTES[fact.dtype]
        if not numel:
            return torch.empty(fact.shape, dtype=dtype)
        return torch.frombuffer(room, dtype=dtype, count=numel, offset=places[name]).view(fact.shape)

    return {name: tensor(name, fact) for name, fact in facts.items()}


class Layout:
    """A file object that keeps what ``torch.save`` writes around the values of ``value``."""

    def __init__(self, value: Any):
        self._parts = [(0, bytearray())]
        with torch.serialization.skip_data():
            torch.save(value, self)  # pyrefly: ignore[bad-argument-type]: a file as far as it is used

    @property
    def begins(self) -> list[int]:
        """Where the values of each storage that has some begin, in the order of the file."""
        return [at + len(data) for at, data in self._parts[:-1]]

    def write(self, data: bytes) -> int:
        self._parts[-1][1].extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Is called to leave room for the values of a storage."""
        self._parts.append((self.tell() + offset, bytearray()))
        return self.tell()

    def tell(self) -> int:
        at, data = self._parts[-1]
        return at + len(data)

    def flush(self) -> None:
        pass

    def parts(self, sums: Sequence[int]) -> list[tuple[int, bytes]]:
        """``(offset, bytes)`` of everything but values. ``sums``: the CRC-32 of the values of each storage that has
        some."""
        parts = [(at, bytearray(data)) for at, data in self._parts]
        for (_, data), value in zip(parts[1:], sums, strict=True):
            data[4:8] = value.to_bytes(4, "little")  # directly behind the values, after a magic number
        last, left = parts[-1][1], iter(sums)
        at = len(last) - _END - int.from_bytes(last[-10:-6], "little")
        at -= _END_64 * (last[-_END - 20 :].startswith(b"PK\x06\x07"))
        while last[at : at + 4] == _ENTRY:
            has_values = any(last[at + 24 : at + 28])
            name, *rest = (int.from_bytes(last[at + place : at + place + 2], "little") for place in (28, 30, 32))
            if has_values and b"/data/" in last[at + 46 : at + 46 + name]:
                last[at + 16 : at + 20] = next(left).to_bytes(4, "little")
            at += 46 + name + sum(rest)
        return [(at, bytes(data)) for at, data in parts]
