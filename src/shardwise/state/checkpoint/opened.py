"""A checkpoint that is read: no byte is used that its checksum does not vouch for.

A reader of a part reads whole blocks, at the ends of the part too, and sums them while they are in memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.state.checkpoint.contents import OPTIMIZER, REST, STATE
from shardwise.state.checkpoint.manifest import DamagedError, Manifest, damaged
from shardwise.state.checkpoint.plain import from_plain, parse
from shardwise.state.checkpoint.sums import BLOCK, sum_of
from shardwise.state.files import BUFFER, OpenFiles
from shardwise.state.formats.safetensors import tensors_in
from shardwise.state.stored import FileTensor

__all__ = ["SavedRun", "VerifiedFiles"]


class _Optimizer(msgspec.Struct, kw_only=True, rename={"kind": "class"}):
    kind: str
    keys: dict[str, dict[str, str | None]]
    state: dict[str, dict[str, Any]]
    param_groups: list[dict[str, Any]]


class _Streams(msgspec.Struct):
    python: tuple[int, Any, Any]
    numpy: Any
    torch: Any


class _Random(msgspec.Struct):
    seed: int
    ranks: list[_Streams]


class _State(msgspec.Struct):
    """What has to stand in the state, whatever the run; the rest is for whom it belongs to."""

    step: dict[str, Any]
    model: dict[str, dict[str, Any]]
    extra: dict[str, Any]
    random: _Random
    optimizer: _Optimizer | None = None


_KEPT = 16  # blocks at the ends of parts: the next tensor often begins in one


class VerifiedFiles(OpenFiles):
    """Reads of a checkpoint's files; every block that is touched is compared with its checksum.

    Args:
        folder: of the checkpoint.
        manifest: what was written there.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        super().__init__()
        self._facts = {folder / name: fact for name, fact in manifest.files.items()}
        self._ends: dict[tuple[Path, int], memoryview] = {}

    def close(self) -> None:
        super().close()
        self._ends.clear()

    def read(self, path: Path, offset: int, memory: memoryview) -> None:
        """Fills ``memory`` with the bytes of ``path`` from ``offset`` on.

        Raises:
            CheckpointError: the file cannot be read, or a block is not what was written.
        """
        fact = self._facts.get(path)
        if fact is None or offset + len(memory) > fact.size:
            raise damaged(path, "something is looked for in it that the manifest does not name")
        position, end = offset, offset + len(memory)
        while position < end:
            block, inside = divmod(position, BLOCK)
            num = min(end, fact.size if end == fact.size else end // BLOCK * BLOCK) - position
            if inside == 0 and num > 0:
                num = min(num, BUFFER)
                self._read_whole(path, block, memory[position - offset : position - offset + num], fact.sums)
            else:
                kept = self._end(path, block, min(BLOCK, fact.size - block * BLOCK), fact.sums)
                num = min(end - position, len(kept) - inside)
                memory[position - offset : position - offset + num] = kept[inside : inside + num]
            position += num

    def _read_whole(self, path: Path, block: int, memory: memoryview, sums: np.ndarray) -> None:
        """Whole blocks, straight to their place."""
        try:
            super().read(path, block * BLOCK, memory)
        except CheckpointError as error:  # a disk that does not give what is there
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


class SavedRun:
    """A checkpoint whose manifest has been read.

    Args:
        folder: of the checkpoint.

    Raises:
        CheckpointError: it is not whole.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.files = VerifiedFiles(folder, self.manifest)

    def __enter__(self) -> "SavedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def text(self, name: str) -> bytes:
        """A whole file.

        Raises:
            CheckpointError: there is none, or it is not what was written.
        """
        if name not in self.manifest.files:
            raise damaged(self.folder / name, "the checkpoint was written without it")
        memory = bytearray(self.manifest.files[name].size)
        self.files.read(self.folder / name, 0, memoryview(memory))
        return bytes(memory)

    def check_heads(self) -> None:
        """Compares the first blocks of every file of tensors, which others read, and every file of another kind."""
        for name, fact in self.manifest.files.items():
            path = self.folder / name
            if name.endswith(".safetensors") and fact.size >= 8:
                length = bytearray(8)
                self.files.read(path, 0, memoryview(length))
                end = min(fact.size, 8 + int.from_bytes(length, "little"))
                self.files.read(path, 0, memoryview(bytearray(end)))
            else:
                self.text(name)

    def verify(self) -> int:
        """Compares everything with its checksum; returns the number of bytes."""
        for name, fact in self.manifest.files.items():
            memory = memoryview(bytearray(min(fact.size, BUFFER)))
            for begin in range(0, fact.size, BUFFER):
                self.files.read(self.folder / name, begin, memory[: min(BUFFER, fact.size - begin)])
        return self.manifest.num_bytes

    def state(self) -> tuple[dict[str, Any], Mapping[str, FileTensor]]:
        """Everything but the models' weights: what is no cut tensor, as it was saved; and the tensors in the optimizer's files.

        Raises:
            CheckpointError: it is not what was written.
        """
        self.check_heads()
        rest = tensors_in(self.folder / REST)
        try:
            plain = parse(self.text(STATE))
            found = {name: self._decoded(value, rest) for name, value in plain.items()}
            msgspec.convert(found, _State)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a text can hold: it is none of ours
            raise damaged(
                self.folder / STATE, f"it is not what a save writes: {type(error).__name__}: {error}"
            ) from error
        optimizer = {
            key: tensor
            for name in self.manifest.files
            if name.startswith(OPTIMIZER)
            for key, tensor in tensors_in(self.folder / name).items()
        }
        return found, optimizer

    def _decoded(self, value: Any, rest: Mapping[str, FileTensor]) -> Any:
        def load(name: str) -> Tensor:
            return rest[name].load(self.files)

        return from_plain(value, load)
