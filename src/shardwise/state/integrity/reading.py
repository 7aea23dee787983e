"""Reads files with the checksums of a manifest: bytes whose checksum differs are never used.

To read a part, whole blocks are read, at its ends too, and compared with their checksums while they are in memory.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.errors import CheckpointError
from shardwise.state.files import OpenFiles, Record
from shardwise.state.integrity.manifest import DamagedError, FileFact, Manifest, damaged
from shardwise.state.integrity.sums import BLOCK, sum_of

_AT_ONCE = 2 * BLOCK  # bytes read, then summed: with more, the first would have left the processor's cache
_KEPT = 16  # blocks at the ends of parts that are cached: the next tensor often begins in one


class VerifiedCheckpoint(NamedTuple):
    folder: Path
    manifest: Manifest


class VerifiedFiles(OpenFiles):
    """Reads files; those in the directory of a checkpoint in whole blocks, each compared with its checksum.

    Args:
        verified: a checkpoint; None: there is none yet.
    """

    def __init__(self, verified: VerifiedCheckpoint | None = None):
        super().__init__()
        self._folders: list[Path] = []
        self._facts: dict[Path, FileFact] = {}
        self.verify_with(verified)
        self._ends: dict[tuple[Path, int], memoryview] = {}

    def verify_with(self, verified: VerifiedCheckpoint | None) -> None:
        """From here on, files in the directory of ``verified`` are compared with its checksums, and only those that its
        manifest names are read."""
        if verified is not None:
            self._folders.append(verified.folder)
            self._facts |= {verified.folder / name: fact for name, fact in verified.manifest.files.items()}

    def close(self) -> None:
        super().close()
        self._ends.clear()

    def whole(self, path: Path) -> bytes:
        if path not in self._facts:
            raise damaged(path, "the checkpoint was written without it")
        memory = bytearray(self._facts[path].size)
        self.read(path, 0, memoryview(memory))
        return bytes(memory)

    def check_heads(self, names: Iterable[str]) -> None:
        """Compares files with their checksums: of safetensors files only the header (other code reads their tensors),
        of others everything. ``names``: in the checkpoint."""
        for path in (folder / name for folder in self._folders for name in names):
            if path.suffix == ".safetensors" and self._facts[path].size >= 8:
                length = bytearray(8)
                self.read(path, 0, memoryview(length))
                end = min(self._facts[path].size, 8 + int.from_bytes(length, "little"))
                self.read(path, 0, memoryview(bytearray(end)))
            else:
                self.whole(path)

    def read(self, path: Path, offset: int, memory: memoryview, record: Record | None = None) -> None:
        """Fills ``memory`` with the bytes of ``path`` from ``offset`` on."""
        fact = self._facts.get(path)
        if fact is None and not any(path.is_relative_to(folder) for folder in self._folders):
            super().read(path, offset, memory, record)
            return
        if fact is None or offset + len(memory) > fact.size:
            raise damaged(path, "something is looked for in it that the manifest does not name")
        position, end = offset, offset + len(memory)
        while position < end:
            block, inside = divmod(position, BLOCK)
            num = min(end, fact.size if end == fact.size else end // BLOCK * BLOCK) - position
            if inside == 0 and num > 0:
                num = min(num, _AT_ONCE)
                self._read_whole(path, block, memory[position - offset : position - offset + num], fact.sums)
            else:
                kept = self._end(path, block, min(BLOCK, fact.size - block * BLOCK), fact.sums)
                num = min(end - position, len(kept) - inside)
                memory[position - offset : position - offset + num] = kept[inside : inside + num]
            position += num

    def _read_whole(self, path: Path, block: int, memory: memoryview, sums: np.ndarray) -> None:
        """Reads whole blocks directly into ``memory``, and compares their checksums."""
        try:
            super().read(path, block * BLOCK, memory)
        except CheckpointError as error:  # the disk cannot read it
            raise DamagedError(error.given, why=error.why, fix=error.fix) from error
        for number, begin in enumerate(range(0, len(memory), BLOCK), start=block):
            if sum_of(memory[begin : begin + BLOCK]) != int(sums[number]):
                raise damaged(path, f"its bytes from {number * BLOCK} on are not what was written there")

    def _end(self, path: Path, block: int, size: int, sums: np.ndarray) -> memoryview:
        key = (path, block)
        if key not in self._ends:
            if len(self._ends) >= _KEPT:
                self._ends.pop(next(iter(self._ends)))
            memory = memoryview(bytearray(size))
            self._read_whole(path, block, memory, sums)
            self._ends[key] = memory
        return self._ends[key]
