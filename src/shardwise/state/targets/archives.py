"""Plans a zip archive that torch can read, before its contents exist: uncompressed records, each at a multiple of 64
bytes, so that the file can be memory-mapped."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PlannedArchive"]

_FOLDER = "archive"
_LIMIT = 0xFFFFFFFF  # sizes and offsets from here on are in the zip64 field
_ALIGN = 64
_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_VERSION, _DATE = 45, (1 << 5) | 1  # the reader must know sizes of 8 bytes; the format's first date


@dataclass(frozen=True)
class _Entry:
    name: bytes
    at: int  # offset of the header
    begin: int
    size: int


class PlannedArchive:
    """The layout of an archive: records are added in order; ``parts`` returns the headers once the checksums are known.

    Attributes:
        size: of the whole archive, when all records have been added.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._end = 0

    def add(self, name: str, size: int) -> int:
        """Plans a record; returns where its bytes begin."""
        path = f"{_FOLDER}/{name}".encode()
        before = self._end + _LOCAL.size + len(path) + (20 if size >= _LIMIT else 0) + 4
        begin = before + -before % _ALIGN
        self._entries.append(_Entry(path, self._end, begin, size))
        self._end = begin + size
        return begin

    def begin_of(self, name: str) -> int:
        """Where a record's bytes begin."""
        path = f"{_FOLDER}/{name}".encode()
        return next(entry.begin for entry in self._entries if entry.name == path)

    @property
    def size(self) -> int:
        return self._end + len(self._list({}))

    def parts(self, sums: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """``(offset, bytes)`` of everything except the records. ``sums``: the checksum of each record by name."""
        found = [(entry.at, self._local(entry, sums)) for entry in self._entries]
        return [*found, (self._end, self._list(sums))]

    def _local(self, entry: _Entry, sums: Mapping[str, int]) -> bytes:
        size = min(entry.size, _LIMIT)
        extra = struct.pack("<HHQQ", 1, 16, entry.size, entry.size) if entry.size >= _LIMIT else b""
        room = entry.begin - entry.at - _LOCAL.size - len(entry.name) - len(extra) - 4
        extra += struct.pack("<HH", 0x4246, room) + b"Z" * room  # the extra field that torch pads with
        head = _LOCAL.pack(
            b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, _sum(entry, sums), size, size, len(entry.name), len(extra)
        )
        return head + entry.name + extra

    def _list(self, sums: Mapping[str, int]) -> bytes:
        """The list of records, and the end record that points to it."""
        out = bytearray()
        for entry in self._entries:
            wide = [entry.size, entry.size] if entry.size >= _LIMIT else []
            wide += [entry.at] if entry.at >= _LIMIT else []
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            size = min(entry.size, _LIMIT)
            out += _CENTRAL.pack(
                b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, _DATE, _sum(entry, sums), size, size, len(entry.name), len(extra),
                0, 0, 0, 0, min(entry.at, _LIMIT),
            )  # fmt: skip
            out += entry.name + extra
        count, length, end = len(self._entries), len(out), self._end
        if count >= 0xFFFF or end >= _LIMIT:
            out += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, count, count, length, end)
            out += struct.pack("<4sIQI", b"PK\x06\x07", 0, end + length, 1)
        few = min(count, 0xFFFF)
        return bytes(out) + struct.pack("<4s4HIIH", b"PK\x05\x06", 0, 0, few, few, length, min(end, _LIMIT), 0)


def _sum(entry: _Entry, sums: Mapping[str, int]) -> int:
    return sums.get(entry.name.decode().partition("/")[2], 0)
