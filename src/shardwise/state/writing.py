"""Writes parts of tensors at their offsets in files: directly from their memory if possible, otherwise block by
block."""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from shardwise.errors import errors_about
from shardwise.model import dtype_name, dtype_of
from shardwise.model.tensors import bytes_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box, blocks, index_of, runs
from shardwise.state.file_layout import Part
from shardwise.state.files import BUFFER
from shardwise.state.rounding import refuse_overflow

LARGE = 1 << 20  # bytes: writes of at least this size are flushed to the disk
BEHIND = 4 * BUFFER  # bytes: how far back pages that have reached the disk are dropped

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def reserve(descriptor: int, size: int) -> None:
    """Makes a file ``size`` bytes long, with disk space reserved if the file system can do that."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        os.ftruncate(descriptor, size)


def by_file(folder: Path, parts: Iterator[Part]) -> Iterator[tuple[Path, list[Part]]]:
    for name, group in itertools.groupby(parts, lambda part: part.file.name):
        yield folder / name, list(group)


def write_part(descriptor: int, part: Part, values: Tensor) -> None:
    """Writes ``values``, the part's box of the model's tensor; directly if their bytes are as in the file, otherwise
    through a buffer."""
    for offset, memory in stretches(part, values):
        write_at(descriptor, memory, offset)


def stretches(part: Part, values: Tensor) -> Iterator[tuple[int, memoryview]]:
    """``(offset in the file, bytes)`` of ``values``, the part's box of the model's tensor: views of their memory if its
    bytes are as in the file, otherwise converted block by block."""
    tensor = part.tensor
    straight = values.device.type == "cpu" and dtype_name(values.dtype) == tensor.dtype and values.is_contiguous()
    if straight and part.view.dims == tuple(range(len(part.view.box.sizes))):  # all of the model's dims, in its order
        yield from _stretches_of_box(part, part.stored, bytes_of(values).numpy().data)
        return
    for box, block, rounded in stored_blocks(part, values):
        with errors_about(part.view.name):
            refuse_overflow(rounded, block, f"to be written in {tensor.dtype}")
        yield from _stretches_of_box(part, box, bytes_of(rounded).numpy().data)


def stored_boxes(part: Part) -> Iterator[tuple[Box, int]]:
    """``(box of the stored tensor, number of bytes)`` of each message or buffer that a part needs."""
    itemsize = DTYPE_BYTES[part.tensor.dtype]
    for box in blocks(part.stored, BUFFER // itemsize):
        yield box, box.numel * itemsize


def stored_blocks(part: Part, values: Tensor) -> Iterator[tuple[Box, Tensor, Tensor]]:
    """Yields ``values`` block by block: the box, the values as they are, and as they are written, on the CPU."""
    turned = part.view.turned(values)
    for box, _ in stored_boxes(part):
        block = turned[index_of(box.within(part.stored))]
        yield box, block, block.to("cpu", dtype_of(part.tensor.dtype)).contiguous()


def write_box(descriptor: int, part: Part, box: Box, memory: memoryview) -> None:
    """Writes a box of the stored tensor, whose bytes are ``memory``, to its contiguous ranges of the file."""
    for offset, stretch in _stretches_of_box(part, box, memory):
        write_at(descriptor, stretch, offset)


def _stretches_of_box(part: Part, box: Box, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
    itemsize, position = DTYPE_BYTES[part.tensor.dtype], 0
    for start, count in runs(box, part.tensor.shape):
        size = count * itemsize
        yield part.tensor.offset + start * itemsize, memory[position : position + size]
        position += size


def write_at(descriptor: int, memory: memoryview, offset: int) -> None:
    """Writes all of ``memory`` at ``offset``; large writes are already being flushed to the disk when this returns."""
    done = 0
    while done < len(memory):
        num = os.pwrite(descriptor, memory[done : done + BUFFER], offset + done)
        if num >= LARGE:
            send_off(descriptor, offset + done, num)
        done += num


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file; it is on disk on return."""
    with opened(path, os.O_CREAT) as descriptor:
        write_at(descriptor, memoryview(content), 0)
        os.fsync(descriptor)


def send_off(descriptor: int, offset: int, num_bytes: int) -> None:
    """Asks the system to write these bytes to the disk now, and to drop earlier ones that are there from its page
    cache.

    Otherwise dirty pages pile up until a sync: measured in comparison, four to six times slower.
    """
    with contextlib.suppress(OSError, AttributeError):  # only advice, which a system may not have
        os.posix_fadvise(descriptor, max(0, offset - BEHIND), num_bytes + BEHIND, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Opens a file for writing, with further ``flags``; yields the descriptor."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
