"""Writing parts of tensors at their place in files: from where they lie if they can go as they are, else block by
block."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from shardwise.errors import errors_about
from shardwise.model import dtype_name, dtype_of
from shardwise.parallel import bytes_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box, blocks, index_of, runs
from shardwise.state.file_layout import Part
from shardwise.state.files import BUFFER
from shardwise.state.rounding import refuse_overflow

__all__ = [
    "by_file",
    "opened",
    "reserve",
    "send_off",
    "stored_blocks",
    "stored_boxes",
    "stretches",
    "write_at",
    "write_box",
    "write_part",
]

LARGE = 1 << 20  # bytes: of a write that is worth a word to the system
BEHIND = 4 * BUFFER  # bytes: how far back pages are looked for that have reached the disk

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def reserve(descriptor: int, size: int) -> None:
    """Makes a file ``size`` bytes long, with room on the disk for them where the file system can promise that.

    Raises:
        OSError: there is no room.
    """
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        os.ftruncate(descriptor, size)


def by_file(folder: Path, parts: Iterator[Part]) -> Iterator[tuple[Path, list[Part]]]:
    """The parts in the order they come in, those of one file together."""
    gathered: list[Part] = []
    for part in parts:
        if gathered and part.file is not gathered[0].file:
            yield folder / gathered[0].file.name, gathered
            gathered = []
        gathered.append(part)
    if gathered:
        yield folder / gathered[0].file.name, gathered


def write_part(descriptor: int, part: Part, values: Tensor) -> None:
    """Writes ``values``, the part's box of the model's tensor; from where they are if they lie there as they will in
    the file, else through a buffer."""
    for offset, memory in stretches(part, values):
        write_at(descriptor, memory, offset)


def stretches(part: Part, values: Tensor) -> Iterator[tuple[int, memoryview]]:
    """``(offset in the file, bytes)`` of ``values``, the part's box of the model's tensor: where they are if they lie
    there as they will in the file, else block by block."""
    tensor = part.tensor
    straight = values.device.type == "cpu" and dtype_name(values.dtype) == tensor.dtype and values.is_contiguous()
    if straight and part.view.is_in_order:
        yield from _stretches_of_box(part, part.stored, bytes_of(values).numpy().data)
        return
    for box, block, rounded in stored_blocks(part, values):
        with errors_about(part.view.name):
            refuse_overflow(rounded, block, f"to be written in {tensor.dtype}")
        yield from _stretches_of_box(part, box, bytes_of(rounded).numpy().data)


def stored_boxes(part: Part) -> Iterator[tuple[Box, int]]:
    """``(box of the stored tensor, bytes)`` of each message or buffer that a part takes."""
    itemsize = DTYPE_BYTES[part.tensor.dtype]
    for box in blocks(part.stored, BUFFER // itemsize):
        yield box, box.numel * itemsize


def stored_blocks(part: Part, values: Tensor) -> Iterator[tuple[Box, Tensor, Tensor]]:
    """``values`` block by block: each as it is, and as it will lie in the file, on the CPU."""
    turned = part.view.turned(values)
    for box, _ in stored_boxes(part):
        block = turned[index_of(box.within(part.stored))]
        yield box, block, block.to("cpu", dtype_of(part.tensor.dtype)).contiguous()


def write_box(descriptor: int, part: Part, box: Box, memory: memoryview) -> None:
    """Writes a box of the stored tensor, whose bytes are ``memory``, in the stretches in which it lies in the file."""
    for offset, stretch in _stretches_of_box(part, box, memory):
        write_at(descriptor, stretch, offset)


def _stretches_of_box(part: Part, box: Box, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
    itemsize, position = DTYPE_BYTES[part.tensor.dtype], 0
    for start, count in runs(box, part.tensor.shape):
        size = count * itemsize
        yield part.tensor.offset + start * itemsize, memory[position : position + size]
        position += size


def write_at(descriptor: int, memory: memoryview, offset: int) -> None:
    """Writes all of ``memory`` at ``offset``; what is large is on its way to the disk when this returns."""
    done = 0
    while done < len(memory):
        num = os.pwrite(descriptor, memory[done : done + BUFFER], offset + done)
        if num >= LARGE:
            send_off(descriptor, offset + done, num)
        done += num


def send_off(descriptor: int, offset: int, num_bytes: int) -> None:
    """Has the system write these bytes to the disk now, and forget those before them that are there already.

    Otherwise they pile up as new pages of the cache until a sync: measured beside it, four to six times slower.
    """
    with contextlib.suppress(OSError, AttributeError):  # advice: a system may not know it
        os.posix_fadvise(descriptor, max(0, offset - BEHIND), num_bytes + BEHIND, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of the file, for writing; ``flags`` beside that."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
