"""Reads files at offsets: descriptors are kept open, a read is complete or an error, one buffer is shared. Records that
come with a checksum are compared with it."""

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from shardwise.errors import CheckpointError

BUFFER = 8 << 20  # bytes of the buffer for values that cannot be read or written directly
SUMMED = 512 << 10  # bytes read, then summed: with more, the first would have left the processor's cache
_MAX_OPEN = 64


# Size, mtime and ctime (ns) of a file when its header was read. ctime cannot be set, unlike mtime by a copy that keeps
# times. No inode: some network file systems change it.
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """A file's :data:`Stamp`, which differs once the file has changed or been replaced."""
    with reading(path):
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class Record(NamedTuple):
    """Bytes of a file with a checksum, the CRC-32 of all of them."""

    file: Path
    offset: int
    size: int
    crc: int


class OpenFiles:
    """Reads parts of files and keeps the files open; a context manager that closes them.

    Attributes:
        num_bytes: bytes read so far, to check the promise that a rank reads only its own pieces.
        sums: of records that are read from their beginning on, in order: how far, and the checksum so far; None: those
            that read do not do so.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.sums: dict[Record, tuple[int, int]] | None = None
        self._open: dict[Path, int] = {}
        self._scratch = memoryview(bytearray(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        self._scratch = memoryview(bytearray(0))

    def read(self, path: Path, offset: int, memory: memoryview, record: Record | None = None) -> None:
        """Fills ``memory`` with the bytes of ``path`` from ``offset`` on, which are in ``record``."""
        done = 0
        try:
            descriptor = self._descriptor(path)
            while done < len(memory):
                num = os.preadv(descriptor, [memory[done : done + (1 << 30)]], offset + done)
                if num == 0:
                    raise OSError(errno.EIO, f"it ends {len(memory) - done} bytes too early")
                done += num
        except OSError as error:
            raise CheckpointError(
                f"the file {path}",
                why=f"reading failed: {error.strerror or error}",
                fix="look whether another program writes it, or copy it here again",
            ) from error
        self.num_bytes += len(memory)
        if record is not None and self.sums is not None:
            end, crc = self.sums.get(record, (record.offset, 0))
            if end == offset:
                self.sums[record] = end, crc = offset + len(memory), zlib.crc32(memory, crc)
                if end == record.offset + record.size and crc != record.crc:
                    raise CheckpointError(
                        f"the file {path}: {record.size} bytes at {record.offset}",
                        why="they do not have the checksum that the file names",
                        fix="copy the file again, or save it again: it is damaged",
                    )

    def compare(self, record: Record) -> None:
        """Reads a record, or what is left of it, and compares its checksum."""
        self.sums = {} if self.sums is None else self.sums
        begin, end = self.sums.get(record, (record.offset, 0))[0], record.offset + record.size
        for offset in range(begin, end, SUMMED):
            self.read(record.file, offset, self.scratch(min(SUMMED, end - offset)), record)

    def scratch(self, num_bytes: int) -> memoryview:
        """A buffer of that size; the next call returns the same memory again."""
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(max(num_bytes, min(BUFFER, 2 * num_bytes))))
        return self._scratch[:num_bytes]

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within: an OSError is raised as the CheckpointError of a file that cannot be opened or read."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"the file {path}",
            why=f"reading failed: {error.strerror or error}",
            fix="look whether it is there, and whether you may read it",
        ) from error


@contextlib.contextmanager
def writing(given: str, fix: str) -> Iterator[None]:
    """Within: an OSError is raised as the error of what is ``given``, which cannot be written."""
    try:
        yield
    except CheckpointError:  # a value out of the dtype's range
        raise
    except OSError as error:
        raise CheckpointError(given, why=f"writing failed: {error.strerror or error}", fix=fix) from error
