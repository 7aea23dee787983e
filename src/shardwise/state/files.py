"""Reads files at offsets: descriptors are kept open, a read is complete or an error, one buffer is shared."""

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.errors import CheckpointError

__all__ = ["BUFFER", "OpenFiles", "Stamp", "stamp_of", "unreadable"]

BUFFER = 8 << 20  # bytes of the buffer for values that cannot be read or written directly
_MAX_OPEN = 64


# Size, mtime and ctime (ns) of a file when its header was read. ctime cannot be set, unlike mtime by a copy that keeps
# times. No inode: some network file systems change it.
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """A file's :data:`Stamp`, which differs once the file has changed or been replaced.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class OpenFiles:
    """Reads parts of files and keeps the files open; a context manager that closes them.

    Attributes:
        num_bytes: bytes read so far, to check the promise that a rank reads only its own pieces.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._open: dict[Path, int] = {}
        self._scratch = memoryview(bytearray(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._scratch = memoryview(bytearray(0))

    def read(self, path: Path, offset: int, memory: memoryview) -> None:
        """Fills ``memory`` with the bytes of ``path`` from ``offset`` on.

        Raises:
            CheckpointError: the file cannot be read, or is too short.
        """
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


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that cannot be opened or read."""
    return CheckpointError(
        f"the file {path}",
        why=f"reading failed: {error.strerror or error}",
        fix="look whether it is there, and whether you may read it",
    )
