"""Writes a rank's byte ranges of files, with checksums, and past the page cache where the system allows it.

Ranges are copied into a window of aligned memory, at their place in the file. The checksum of a block is computed as
soon as it is complete, while it is in the processor's cache; a window that is full (or left) is written by a second
thread while the next ones are filled. A range whose memory has the same alignment to a page as its place in the file
needs no window for its whole blocks. Whole pages are written to the disk directly (O_DIRECT, which needs memory, offset
and length aligned); the ragged ends of a range go through the page cache, and so does everything on file systems
without direct writes.
"""

import collections
import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.model.large_pages import empty_in_large_pages
from shardwise.state.checkpoint.fault_points import at_fault_point
from shardwise.state.integrity.sums import BLOCK, Sums
from shardwise.state.writing import send_off

WINDOW = 32 * BLOCK
QUEUED = 2  # windows being written or waiting while another is filled: the disk never waits for a window
PAGE = 4096  # bytes: alignment of a direct write; no disk needs more

pwrite = os.pwrite  # replaced by tests that inject faults


class BlockWriter:
    """Writes files one after the other; a context manager that ends its thread and frees its memory."""

    def __init__(self, sums: Sums):
        self._sums = sums
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-writer")
        self._windows = collections.deque(_Window() for _ in range(1 + QUEUED))  # the first is filled
        self._under_way: collections.deque[Future[None]] = collections.deque()  # of other windows, or direct
        self._file: _File | None = None
        self._is_first = True

    def __enter__(self) -> "BlockWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._windows.clear()

    @contextlib.contextmanager
    def file(self, path: Path, name: str, size: int) -> Iterator[None]:
        """Within, :meth:`write` writes to this file, which has its ``size`` already; afterwards it is synced to disk."""
        self._file = _File(path, name, size)
        try:
            yield
            self._leave_window()
            self._settle()
            at_fault_point("written")
            self._file.sync()
            at_fault_point("synced")
        finally:
            while self._under_way:
                self._under_way.popleft().exception()  # another error is being raised already: this one is dropped
            for window in self._windows:
                window.clear()
            self._file.close()

    def write(self, offset: int, memory: memoryview) -> None:
        """Writes ``memory`` at ``offset`` of the file; in any order, each byte once. ``memory`` must not change before
        the with block of :meth:`file` ends."""
        values = np.frombuffer(memory, np.uint8)
        first, last = -(-offset // BLOCK) * BLOCK, (offset + len(values)) // BLOCK * BLOCK
        if last > first and (values.ctypes.data - offset) % PAGE == 0:
            self._write_by_window(offset, values[: first - offset])
            self._write_as_it_lies(first, memory[first - offset : last - offset])
            offset, values = last, values[last - offset :]
        self._write_by_window(offset, values)

    def _write_by_window(self, offset: int, values: np.ndarray) -> None:
        assert self._file is not None
        while len(values):
            base = offset // WINDOW * WINDOW
            if base != self._windows[0].base:
                self._leave_window()
                self._windows[0].base = base
            num = min(len(values), base + WINDOW - offset)
            self._windows[0].put(offset - base, values[:num], self._file, self._sums)
            offset, values = offset + num, values[num:]

    def _write_as_it_lies(self, offset: int, memory: memoryview) -> None:
        """Writes whole blocks straight from ``memory``."""
        assert self._file is not None
        for start in range(0, len(memory), WINDOW):
            part = memory[start : start + WINDOW]
            for block in range(0, len(part), BLOCK):
                self._sums.add(self._file.name, (offset + start + block) // BLOCK, part[block : block + BLOCK])
            self._submit(self._file.write, offset + start, part)

    def _leave_window(self) -> None:
        if not self._windows[0].covered:
            return
        assert self._file is not None
        self._submit(self._windows[0].empty_into, self._file, self._sums)
        self._windows.rotate(-1)

    def _submit(self, work: Callable[..., None], *args: object) -> None:
        try:
            self._under_way.append(self._thread.submit(work, *args))
        except RuntimeError:  # the program is ending and its threads take no more work: this is its last save
            work(*args)
        if self._is_first:
            self._is_first = False
            at_fault_point("half-written")
        self._settle(QUEUED)  # before a window that is being written is filled again

    def _settle(self, num_left: int = 0) -> None:
        """Waits until no more than ``num_left`` writes are under way, and raises their errors."""
        while len(self._under_way) > num_left:
            self._under_way.popleft().result()


def memory_in_line(like: Tensor, offset: int) -> Tensor:
    """A new CPU tensor like ``like`` whose memory has the same alignment to a page as byte ``offset`` of a file, so
    that it can be written directly."""
    size = like.numel() * like.element_size()
    raw = empty_in_large_pages([size + PAGE], torch.uint8)
    begin = (offset - raw.data_ptr()) % PAGE
    if size < BLOCK or begin % like.element_size():
        return torch.empty(like.shape, dtype=like.dtype)
    return raw[begin : begin + size].view(like.dtype).view(like.shape)


class _Window:
    """A buffer for the ``WINDOW`` bytes of a file from ``base`` on."""

    def __init__(self) -> None:
        self.base = 0
        self.values = np.frombuffer(mmap.mmap(-1, WINDOW), np.uint8)  # page-aligned
        self.covered: list[tuple[int, int]] = []  # begin and end of each range, in the order of `put`
        self._in_pieces: set[int] = set()  # blocks without a checksum yet

    def put(self, begin: int, values: np.ndarray, file: "_File", sums: Sums) -> None:
        """Copies ``values`` to ``begin``, and computes the checksums of the blocks that they fill."""
        end = begin + len(values)
        size = min(WINDOW, file.size - self.base)
        for start in range(begin // BLOCK * BLOCK, end, BLOCK):
            stop = min(start + BLOCK, size)
            low, high = max(begin, start), min(end, stop)
            self.values[low:high] = values[low - begin : high - begin]  # numpy releases the GIL for it
            if (low, high) == (start, stop):
                sums.add(file.name, (self.base + start) // BLOCK, self.values[start:stop].data)
            else:
                self._in_pieces.add(start // BLOCK)
        if self.covered and self.covered[-1][1] == begin:
            begin = self.covered.pop()[0]
        self.covered.append((begin, end))

    def empty_into(self, file: "_File", sums: Sums) -> None:
        covered, in_pieces = sorted(self.covered), sorted(self._in_pieces)
        self.clear()
        position = 0
        for begin, end in [*covered, (min(WINDOW, file.size - self.base), 0)] if in_pieces else ():
            self.values[position:begin] = 0  # what this rank does not write: checksums are of zeros there
            position = end
        for block in in_pieces:
            first = block * BLOCK
            last = min(first + BLOCK, file.size - self.base)
            sums.add(file.name, (self.base + first) // BLOCK, self.values[first:last].data)
        for begin, end in covered:
            file.write(self.base + begin, self.values[begin:end].data)

    def clear(self) -> None:
        self.covered, self._in_pieces = [], set()


class _File:
    """An existing file of full size, open for direct and for cached writes."""

    def __init__(self, path: Path, name: str, size: int):
        self.name, self.size = name, size
        self._cached = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # the system has no direct writes
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)

    def write(self, offset: int, memory: memoryview) -> None:
        """Writes ``memory``, whose alignment to a page is that of ``offset``."""
        end = offset + len(memory)
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        if self._direct is None or last <= first:
            self._write_cached(offset, memory)
            return
        self._write_cached(offset, memory[: first - offset])
        done = self._write_direct(first, memory[first - offset : last - offset])
        self._write_cached(first + done, memory[first + done - offset :])

    def _write_direct(self, offset: int, memory: memoryview) -> int:
        """Writes directly; returns the number of bytes written."""
        done = 0
        assert self._direct is not None
        while done < len(memory) and done % PAGE == 0:
            try:
                done += pwrite(self._direct, memory[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)  # this file system needs another alignment, or has no direct writes
                self._direct = None
                break
        return done

    def _write_cached(self, offset: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            done += pwrite(self._cached, memory[done:], offset + done)
        if len(memory) > PAGE:
            send_off(self._cached, offset, len(memory))

    def sync(self) -> None:
        os.fsync(self._cached)

    def close(self) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)
