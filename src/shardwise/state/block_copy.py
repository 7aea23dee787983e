"""Writes the files of a conversion: tensor values block by block at their planned places, then headers and other
files."""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import blocks
from shardwise.state.converted import ConvertedTensor
from shardwise.state.files import BUFFER
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.integrity.sums import Sums
from shardwise.state.targets.plan import ConversionPlan, Fixed
from shardwise.state.writing import opened, reserve, write_at

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, its bytes done so far, and its bytes in total."""


class BlockCopy:
    """Writes the files of a conversion.

    Args:
        items: the tensors that the plan's pieces are parts of.
        sidecars: further files: name -> content.
    """

    def __init__(
        self, plan: ConversionPlan, items: Sequence[ConvertedTensor], sidecars: Mapping[str, bytes], folder: Path
    ):
        self._plan, self._sidecars, self._folder = plan, sidecars, folder
        self._items = {item.name: item for item in items}
        self._sums = [0] * len(plan.pieces)  # the CRC-32 of the bytes of each so far
        self._checksums = Sums() if plan.manifest is not None else None

    def values(self, reader: VerifiedFiles, progress: Progress) -> None:
        """Writes every piece. A block is read into one buffer while the one before it is written from the other."""
        plan = self._plan
        for name, size in plan.files.items():
            with opened(self._folder / name, os.O_CREAT) as descriptor:
                reserve(descriptor, size)
        done, total = 0, sum(piece.num_bytes for piece in plan.pieces)
        progress("converting", done, total)
        buffers = [torch.empty(BUFFER, dtype=torch.uint8) for _ in range(2)]
        with ThreadPoolExecutor(1) as writer:
            written: Future[None] | None = None
            for number, piece in enumerate(plan.pieces):
                position = 0
                for box in blocks(piece.box, BUFFER // DTYPE_BYTES[piece.dtype]):
                    memory = self._items[piece.name].block(box, buffers[0], reader).numpy().data
                    if written is not None:
                        written.result()
                    written = writer.submit(self._write, number, memory, position)
                    buffers.reverse()
                    position, done = position + len(memory), done + len(memory)
                    progress("converting", done, total)
            if written is not None:
                written.result()

    def _write(self, number: int, memory: memoryview, position: int) -> None:
        """Writes a block of a piece; runs in the writer thread."""
        piece = self._plan.pieces[number]
        if self._checksums is not None:
            self._checksums.add_part(piece.file, self._plan.files[piece.file], piece.offset + position, memory)
        if self._plan.summed:
            self._sums[number] = zlib.crc32(memory, self._sums[number])
        with opened(self._folder / piece.file) as descriptor:
            write_at(descriptor, memory, piece.offset + position)

    def rest(self) -> None:
        """Writes headers, indices and further files, and a manifest last. All of it is on disk on return."""
        fixed = self._plan.finish(self._sums)
        fixed += [Fixed(name, 0, data) for name, data in self._sidecars.items()]
        if self._plan.manifest is not None and self._checksums is not None:
            sizes = {**self._plan.files, **{name: len(data) for name, data in self._sidecars.items()}}
            for part in fixed:
                self._checksums.add_part(part.file, sizes[part.file], part.offset, memoryview(part.data))
            fixed.append(self._plan.manifest(sizes, self._checksums))
        for part in fixed:
            with opened(self._folder / part.file, os.O_CREAT) as descriptor:
                write_at(descriptor, memoryview(part.data), part.offset)
        for name in {**self._plan.files, **dict.fromkeys(part.file for part in fixed)}:
            with opened(self._folder / name) as descriptor:
                os.fsync(descriptor)
