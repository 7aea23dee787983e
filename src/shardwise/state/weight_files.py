"""Writes weights into the files of a directory, each rank its own pieces: one save, stage by stage."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config.conversion import ENDINGS
from shardwise.config.folders import check_place
from shardwise.errors import CheckpointError, ConfigError, errors_about
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime
from shardwise.state.file_layout import FileLayout, Part, parts_of
from shardwise.state.formats.folder import INDEX
from shardwise.state.origin import Origin
from shardwise.state.rounding import refuse_overflow
from shardwise.state.sidecars import sidecar_files
from shardwise.state.staging import TOKEN, Staged, StagedSave, resolved
from shardwise.state.writing import (
    by_file,
    opened,
    reserve,
    stored_blocks,
    stored_boxes,
    write_at,
    write_box,
    write_file,
    write_part,
)
from shardwise.world.collectively import collectively


class _Local:
    """What this rank stores, by name; what is computed is kept until the next is asked for."""

    def __init__(self, stored: Mapping[str, Tensor], computed: Mapping[str, Callable[[], Tensor]]):
        self._stored, self._computed = stored, computed
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._computed:
            return self._stored[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # one is in memory at a time
            self._last = name, self._computed[name]()
        return self._last[1]


class WeightFiles(StagedSave):
    """One save on one rank: :meth:`run`, with a method per stage, in the order in which they are called."""

    what = "weights to"

    def __init__(
        self,
        runtime: Runtime,
        file_layout: FileLayout,
        dest: Path,
        dtype: str | None,
        computed: Mapping[str, Tensor],
        values: Mapping[str, Callable[[], Tensor]],
        is_packed: bool,
        merges: bool,
    ):
        super().__init__(runtime.world, dest)
        self.runtime, self.world, self.file_layout, self.dtype = runtime, runtime.world, file_layout, dtype
        self.local, self.is_packed = _Local({**runtime.local_tensors(), **computed}, values), is_packed
        self.merges = merges
        self.absent: list[int] = []  # ranks that do not see the directory
        self.notes: list[str] = []

    def run(self) -> None:
        """Writes the directory, stage by stage. All ranks must call it."""
        try:
            collectively(self.world, "save_weights, making the files", self.make_files, on_main=True)
            self.absent = self.meet("save_weights")
            collectively(self.world, "save_weights, writing", self.write_own)
            collectively(self.world, "save_weights, receiving", self.stream)
            collectively(self.world, "save_weights, putting it in place", self.finish, on_main=True)
        finally:
            self.close()

    def make_files(self) -> None:
        """On rank 0: makes the files in their final size, with their headers, so that a full disk is found before any
        weights are written."""
        if self.dest.suffix in ENDINGS and not self.dest.is_dir():
            bare = self.dest.with_suffix("")
            raise ConfigError(
                f"weights to {self.dest}",
                why="a model directory is written, with its configuration and an index, and this is the name of a file",
                fix=f"save_weights(model, {str(bare)!r}); the file will be {bare}/model.safetensors",
            )
        dest = resolved(self.dest, "weights")
        check_place(dest, "weights")
        base = self.runtime.memory(Origin).folder
        if self.merges and base is not None and base.resolve() == dest:
            raise CheckpointError(
                f"merged weights to {dest}",
                why="the model was loaded from there: its adapters are beside those weights, and would be applied twice to the merged ones",
                fix=f"name another folder: {dest}-merged",
            )
        with self.errors_of_writing():
            self.staged = Staged(dest)
            self.folder = self.staged.path
            for file in self.file_layout.files:
                with opened(self.folder / file.name, os.O_CREAT) as descriptor:
                    reserve(descriptor, file.size)
                    write_at(descriptor, memoryview(file.head), 0)

    def write_own(self) -> None:
        """Writes this rank's pieces directly from its shards, and syncs each file when it is done."""
        if self.world.rank in self.absent:
            return
        with self.errors_of_writing():
            for path, parts in by_file(self.folder, parts_of(self.runtime, self.file_layout, self.world.rank)):
                with opened(path) as descriptor:
                    for part in parts:
                        write_part(descriptor, part, self.local[part.view.name][part.local])
                    os.fsync(descriptor)

    def stream(self) -> None:
        """Sends the pieces of ranks that do not see the directory to rank 0, in messages of bounded size, rank by
        rank."""
        if self.world.rank in self.absent:
            self._send()
        if not self.world.is_main:
            return
        problem: OSError | None = None
        for rank in sorted(self.absent):
            for path, parts in by_file(self.folder, parts_of(self.runtime, self.file_layout, rank)):
                problem = self._receive(rank, path, parts, problem)
        if problem is not None:
            with self.errors_of_writing():
                raise problem

    def _send(self) -> None:
        problem: CheckpointError | None = None
        for part in parts_of(self.runtime, self.file_layout, self.world.rank):
            for _, block, rounded in stored_blocks(part, self.local[part.view.name][part.local]):
                dist.send(bytes_of(rounded).to(self.world.message_device), dst=0)
                try:
                    with errors_about(part.view.name):
                        refuse_overflow(rounded, block, f"to be written in {part.tensor.dtype}")
                except CheckpointError as error:  # raised once rank 0 has received everything
                    problem = problem or error
        if problem is not None:
            raise problem

    def _receive(self, rank: int, path: Path, parts: list[Part], problem: OSError | None) -> OSError | None:
        """Receives and writes what ``rank`` sends for one file; all of it even if it cannot be written, since the rank
        must not wait."""
        wires = ((part, box, size) for part in parts for box, size in stored_boxes(part))
        try:
            if problem is not None:
                raise problem
            with opened(path) as descriptor:
                for part, box, size in wires:
                    write_box(descriptor, part, box, self._message(rank, size))
                os.fsync(descriptor)
        except OSError as error:
            problem = error
        for _, _, size in wires:
            self._message(rank, size)
        return problem

    def _message(self, rank: int, size: int) -> memoryview:
        wire = torch.empty(size, dtype=torch.uint8, device=self.world.message_device)
        dist.recv(wire, src=rank)
        return wire.cpu().numpy().data

    def finish(self) -> None:
        """On rank 0: writes the index, configuration and tokenizer files, then moves the directory to its place."""
        assert self.staged is not None
        with self.errors_of_writing():
            (self.folder / TOKEN).unlink()
            sidecars, self.notes = sidecar_files(self.runtime, self.dtype, packed=self.is_packed)
            index = self.file_layout.index()
            if index is not None:
                sidecars[INDEX] = index
            for name, content in sidecars.items():
                write_file(self.folder / name, content)
            self.staged.commit("weights")
