"""Reads the zip archives of ``torch.save``: uncompressed records, each at one place of the file.

Python's ``zipfile`` reads the list of records; what it accepts but torch never writes is refused here.
"""

import io
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import CheckpointError
from shardwise.state.files import Stamp, stamp_of, unreadable

__all__ = ["Archive", "FileSlice", "Record", "open_archive"]

MAX_SMALL = 1 << 30  # bytes of a record that is read whole
_LOCAL = struct.Struct("<4s5H3I2H")  # the header before each record; it has the lengths of its name and extra field
_LOCAL_MAGIC = b"PK\x03\x04"
_SUMS_MAGIC = b"PK\x07\x08"
_ENCRYPTED, _SUMS_BEHIND = 0x1, 0x8


@dataclass(frozen=True)
class Record:
    """A record of an archive: ``size`` bytes at ``offset`` of the file, and their checksum."""

    offset: int
    size: int
    crc: int


@dataclass(frozen=True)
class Archive:
    """The records of an archive by name, without the folder that all of its names begin with."""

    path: Path
    stamp: Stamp
    records: dict[str, Record]

    def read(self, name: str) -> bytes:
        """Reads a whole record and compares its checksum: for the small ones that describe the others."""
        record = self.records[name]
        if record.size > MAX_SMALL:
            raise refusal(self.path, f"the record {name} of {record.size} bytes", f"at most {MAX_SMALL} are read")
        with self.path.open("rb") as file:
            file.seek(record.offset)
            data = file.read(record.size)
        # 0: torch computed none (torch.serialization.set_crc32_options).
        if len(data) != record.size or record.crc not in (0, zlib.crc32(data)):
            raise refusal(self.path, f"the record {name}", "its bytes do not have the checksum that the archive names")
        return data


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

    def tell(self) -> int:
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
    """Opens an archive that is a file or is inside one, and reads its list of records.

    Raises:
        CheckpointError: it is not a complete archive, or not one that torch wrote.
    """
    stamp = stamp_of(path)
    try:
        length = stamp[0] if length is None else length
        with FileSlice(path, begin, length) as file:
            buffered = io.BufferedReader(file, 1 << 14)
            with zipfile.ZipFile(buffered) as archive:
                entries, end = archive.infolist(), archive.start_dir
            if any(entry.filename.endswith("/constants.pkl") for entry in entries):
                raise CheckpointError(
                    f"{path}: a TorchScript archive",
                    why="it is a program with its weights, and weights are read from files by torch.save",
                    fix="torch.save(torch.jit.load(path).state_dict(), other_path), and give that one",
                )
            spans = {entry.filename: _span(path, buffered, entry) for entry in entries}
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise refusal(path, f"{length} bytes at {begin}", f"that is no whole archive: {error}"[:200]) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(spans) != len(entries):
        names = [entry.filename for entry in entries]
        twice = next(name for name in names if names.count(name) > 1)
        raise refusal(path, f"the record {twice}", "it is there twice")
    _check_apart(path, spans, end)
    folders = {name.partition("/")[0] for name in spans}
    if len(folders) != 1 or not all("/" in name for name in spans):
        raise refusal(path, "its records", "they do not lie in one folder, as those of torch do")
    return Archive(
        path,
        stamp,
        {
            name.partition("/")[2]: Record(begin + spans[name][1], entry.file_size, entry.CRC)
            for name, entry in zip(spans, entries, strict=True)
        },
    )


def _span(path: Path, file: BinaryIO, entry: zipfile.ZipInfo) -> tuple[int, int, int]:
    """A record's places in the file: where its header begins, where its bytes begin, and where all that belongs to it
    ends."""
    name = entry.filename
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise refusal(path, f"the record {name}", "it is compressed, and torch stores records as they are")
    if entry.flag_bits & _ENCRYPTED or entry.orig_filename != name or name.endswith("/"):
        raise refusal(path, f"the record {name!r}", "torch writes none of that kind")
    file.seek(entry.header_offset)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size or not head.startswith(_LOCAL_MAGIC):
        raise refusal(path, f"the record {name}", f"at {entry.header_offset} there is none")
    _, _, flags, method, _, _, crc, _, size, name_length, extra_length = _LOCAL.unpack(head)
    own = file.read(name_length).decode("utf-8", "replace")
    same = flags & _SUMS_BEHIND or (crc == entry.CRC and size in (entry.file_size, 0xFFFFFFFF))
    if own != name or method != zipfile.ZIP_STORED or not same:
        raise refusal(path, f"the record {name}", f"its own header (of {own!r}) and the list of records contradict")
    begin = entry.header_offset + _LOCAL.size + name_length + extra_length
    end = begin + entry.file_size
    if flags & _SUMS_BEHIND:
        end += _sums_behind(path, file, entry, end)
    return entry.header_offset, begin, end


def _sums_behind(path: Path, file: BinaryIO, entry: zipfile.ZipInfo, end: int) -> int:
    """Length of the checksum and sizes that torch writes after a record. They prove where the record begins: with one
    wrong bit in the header's lengths, values would be read from a wrong offset."""
    file.seek(end)
    tail = file.read(24)
    for form in ("<4sIII", "<4sIQQ"):
        if entry.file_size < 1 << 32 or "Q" in form:
            wanted = struct.pack(form, _SUMS_MAGIC, entry.CRC, entry.file_size, entry.file_size)
            if tail.startswith(wanted):
                return len(wanted)
    raise refusal(path, f"the record {entry.filename}", "it does not end where it should: its header is damaged")


def _check_apart(path: Path, spans: dict[str, tuple[int, int, int]], end: int) -> None:
    """Refuses records that overlap or have bytes between them."""
    last, position = "", 0
    for name, (start, _, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start != position:
            kind = "overlaps" if start < position else "leaves a gap behind"
            raise refusal(path, f"the record {name}", f"it {kind} {last or 'the beginning'}")
        last, position = name, stop
    if position != end:
        raise refusal(path, f"the record {last}", "it does not end where the list of records begins")


def refusal(path: Path, given: str, why: str, name: str | None = None) -> CheckpointError:
    """The error for a torch file that is damaged or not written by torch."""
    return CheckpointError(
        f"{path}: {given}", why=why, fix="copy the file again, or save it again: it is damaged", name=name
    )
