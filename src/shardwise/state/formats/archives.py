"""Opens the zip archives of ``torch.save`` with Python's ``zipfile``: uncompressed records, each at one place of the
file.

What ``zipfile`` reads by another place than torch would, or without comparing a checksum, is refused or compared here.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import CheckpointError
from shardwise.state.files import Record, Stamp, reading, stamp_of
from shardwise.state.formats.checks import damaged

SMALL = ("data.pkl", "byteorder")  # records that describe the others, and are read whole
MAX_SMALL = 1 << 30  # bytes
_SUMS_BEHIND = 0x8  # flag: a record's checksum follows its bytes


@dataclass(frozen=True)
class Archive:
    """The records of an archive by name, without the folder that all of its names begin with. ``small``: the content of
    those that describe the others."""

    path: Path
    stamp: Stamp
    records: Mapping[str, Record]
    small: Mapping[str, bytes]


class FileSlice(io.RawIOBase):
    """A file object for ``length`` bytes of a file from ``begin`` on."""

    def __init__(self, path: Path, begin: int, length: int):
        self._file = path.open("rb")
        self._begin, self._length, self._position = begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = max(0, min(len(buffer), self._length - self._position))
        data = os.pread(self._file.fileno(), size, self._begin + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_archive(path: Path, begin: int = 0, length: int | None = None) -> Archive:
    """Opens an archive that is a file or is inside one, and reads its list of records."""
    stamp = stamp_of(path)
    try:
        length = stamp[0] if length is None else length
        with (
            reading(path),
            io.BufferedReader(FileSlice(path, begin, length), 1 << 14) as file,
            zipfile.ZipFile(file) as archive,
        ):
            if any(entry.filename.endswith("/constants.pkl") for entry in archive.infolist()):
                raise CheckpointError(
                    f"{path}: a TorchScript archive",
                    why="it is a program with its weights, and weights are read from files by torch.save",
                    fix="torch.save(torch.jit.load(path).state_dict(), other_path), and give that one",
                )
            return Archive(path, stamp, *_records(path, archive, file, begin))
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises many kinds
        raise damaged(path, f"{length} bytes at {begin}", f"that is no whole archive: {error}"[:200]) from error


def _records(
    path: Path, archive: zipfile.ZipFile, file: BinaryIO, begin: int
) -> tuple[dict[str, Record], dict[str, bytes]]:
    """The records of an archive that begins at ``begin`` of the file, and the content of the small ones."""
    records: dict[str, Record] = {}
    small: dict[str, bytes] = {}
    home = next((entry.filename.partition("/")[0] for entry in archive.infolist()), "")
    for entry in archive.infolist():
        folder, _, name = entry.filename.partition("/")
        if folder != home or not name or name in records:
            raise damaged(path, f"the record {entry.filename}", "it is there twice, or beside torch's folder")
        records[name] = Record(path, begin + _begin_of(path, archive, file, entry), entry.file_size, entry.CRC)
        if name in SMALL:
            if entry.file_size > MAX_SMALL:
                raise damaged(path, f"the record {name} of {entry.file_size} bytes", f"at most {MAX_SMALL} are read")
            small[name] = file.read(entry.file_size)
            # 0: torch computed none (torch.serialization.set_crc32_options).
            if len(small[name]) != entry.file_size or entry.CRC not in (0, zlib.crc32(small[name])):
                raise damaged(path, f"the record {name}", "its bytes do not have the archive's checksum for it")
    end = 0
    for name, record in sorted(records.items(), key=lambda item: item[1].offset):
        if record.offset < end:
            raise damaged(path, f"the record {name}", "it overlaps the one before it")
        end = record.offset + record.size
    return records, small


def _begin_of(path: Path, archive: zipfile.ZipFile, file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin; ``file`` is there on return."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise damaged(path, f"the record {entry.filename}", "it is compressed, and torch stores records as they are")
    with archive.open(entry):  # which compares the name in the record's own header
        begin = file.tell()
    # One wrong bit in the length of that header, and values would be read from a wrong place.
    if entry.flag_bits & _SUMS_BEHIND:
        file.seek(begin + entry.file_size)
        if file.read(8) != b"PK\x07\x08" + entry.CRC.to_bytes(4, "little"):
            raise damaged(
                path, f"the record {entry.filename}", "it does not end where it should: its header is damaged"
            )
        file.seek(begin)
    return begin
