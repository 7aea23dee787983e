"""Reads parts of stored tensors, from any kind of source: all weights are loaded through this.

Every source (safetensors files, a torch file, a DCP directory, a state dict in memory) is a :class:`Source`: names,
each with a :class:`TensorSource` from which any box can be read. Files are read at the offsets of that box, directly
into the target memory if dtype and order allow it, otherwise through a buffer of bounded size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, errors_about
from shardwise.model import dtype_name, dtype_of
from shardwise.model.tensors import bytes_of
from shardwise.recipe.boxes import Box, blocks, common, index_of, row_strides, run_length, runs, whole
from shardwise.recipe.dtypes import FLOATING
from shardwise.state.files import BUFFER, OpenFiles, Record, Stamp, stamp_of
from shardwise.state.integrity.reading import VerifiedCheckpoint
from shardwise.state.rounding import copy_checked

SHORT_RUN = 4096  # bytes, a page: for shorter runs, reading what is between them costs less than another call


def is_rounded(dtype: str) -> bool:
    """Whether tensors of ``dtype`` are cast when weights are written in another dtype.

    Numbers of one byte are not: they are quantized weights, whose meaning depends on a separate scale.
    """
    return dtype in FLOATING


@dataclass(frozen=True, eq=False)
class TensorSource(ABC):
    """A stored tensor that can be read in parts.

    Attributes:
        dtype: torch's name for it, without ``torch.``.
    """

    shape: tuple[int, ...]
    dtype: str

    @abstractmethod
    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        """Reads the values of ``box`` into ``out``, which has the box's sizes, any dtype and any device."""

    @property
    def origins(self) -> tuple["Chunk", ...]:
        """All places in files from which its values are read."""
        return ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * dtype_of(self.dtype).itemsize

    def load(self, files: OpenFiles, box: Box | None = None) -> Tensor:
        """Reads ``box`` (None: all of it) into a new CPU tensor."""
        box = whole(self.shape) if box is None else box
        out = torch.empty(box.sizes, dtype=dtype_of(self.dtype))
        self.read(box, out, files)
        return out


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the place of its bytes: at ``offset`` of ``file``, row-major or with ``strides`` (in
    elements). ``stamp``: of the file, from before its header was read. ``record``: what it is in, if that has a
    checksum."""

    box: Box
    file: Path
    stamp: Stamp
    offset: int
    strides: tuple[int, ...] | None = None
    record: Record | None = None


@dataclass(frozen=True, eq=False)
class FileTensor(TensorSource):
    """A tensor in files, in chunks that tile it."""

    chunks: tuple[Chunk, ...]

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return self.chunks

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        if len(self.chunks) == 1:  # the usual case, and there are many tensors
            _read_chunk(self.chunks[0], box, out, self.dtype, files)
            return
        for chunk in self.chunks:
            part = common(box, chunk.box)
            if part is not None:
                _read_chunk(chunk, part.within(chunk.box), out[index_of(part.within(box))], self.dtype, files)


@dataclass(frozen=True, eq=False)
class InMemoryTensor(TensorSource):
    """A full tensor in memory, as of a state dict."""

    tensor: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> "InMemoryTensor":
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.detach())

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        copy_checked(out, self.tensor[index_of(box)], "a state dict")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Opened weights that can be read, of any kind of file or a state dict.

    Attributes:
        kind: the kind of source, for messages ("a Hugging Face directory").
        tensors: name in the source -> tensor.
        left_out: name -> why it is left out, for entries that are not weights.
        extra: name -> what a module's ``get_extra_state`` returned; in state dicts.
        values: name -> any other entry that is no tensor; in state dicts.
        metadata: name of a module -> its version, as torch puts it on a state dict; None: there is none.
        verified: the checkpoint that it is in; its checksums are compared if it is read by
            :class:`~shardwise.state.integrity.reading.VerifiedFiles`.
        folder: the directory of a model, with its config and tokenizer files; None if there is none.
        left_base: where the frozen weights are, of a checkpoint without them; None: it has all.
    """

    place: str
    kind: str
    tensors: Mapping[str, TensorSource]
    left_out: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    folder: Path | None = None
    verified: VerifiedCheckpoint | None = None
    left_base: str | None = None


def refuse_changed(tensors: Iterable[TensorSource]) -> None:
    """Refuses files that changed while they were read: values may come from another version than their offsets. Called
    after reading."""
    for path, stamp in sorted({(chunk.file, chunk.stamp) for stored in tensors for chunk in stored.origins}):
        if stamp_of(path) != stamp:
            raise CheckpointError(
                f"the file {path}",
                why="it changed while it was being read, or another took its place",
                fix="try again when no program writes to it",
            )


def compare_sums(tensors: Mapping[str, TensorSource], files: OpenFiles, rank: int = 0, num_ranks: int = 1) -> None:
    """Compares the records that ``tensors`` are in with their checksums, but for those that ``files`` has read. Each
    rank takes about as many bytes of them."""
    names = {chunk.record: name for name, stored in tensors.items() for chunk in stored.origins if chunk.record}
    total, before = sum(record.size for record in names), 0
    for record in sorted(names):
        share = (before + record.size // 2) * num_ranks // total
        before += record.size
        if share == rank:
            with errors_about(names[record]):
                files.compare(record)


def _read_chunk(chunk: Chunk, box: Box, out: Tensor, dtype: str, files: OpenFiles) -> None:
    """Reads ``box``, which is relative to the chunk's beginning."""
    kind = dtype_of(dtype)
    if chunk.strides is not None:
        _read_strided(chunk, box, out, kind, files)
        return
    shape = chunk.box.sizes
    length = run_length(box, shape) * kind.itemsize
    if length < SHORT_RUN and length < box.numel * kind.itemsize:
        _read_strided(chunk, box, out, kind, files)
        return

    def fill(memory: memoryview, part: Box) -> None:
        position = 0
        for start, count in runs(part, shape):
            end, offset = position + count * kind.itemsize, chunk.offset + start * kind.itemsize
            files.read(chunk.file, offset, memory[position:end], chunk.record)
            position = end

    if out.dtype == kind and out.device.type == "cpu" and out.is_contiguous():
        fill(bytes_of(out).numpy().data, box)
        return
    for part in blocks(box, BUFFER // kind.itemsize):
        scratch = files.scratch(part.numel * kind.itemsize)
        fill(scratch, part)
        values = torch.frombuffer(scratch, dtype=kind).view(part.sizes)
        copy_checked(out[index_of(part.within(box))], values, str(chunk.file))


def _read_strided(chunk: Chunk, box: Box, out: Tensor, kind: torch.dtype, files: OpenFiles) -> None:
    """Reads ranges that cover a few rows each, and copies the needed values from them."""
    strides = chunk.strides if chunk.strides is not None else row_strides(chunk.box.sizes)
    for part in _parts_that_span(box, strides, BUFFER // kind.itemsize):
        first = sum(start * stride for start, stride in zip(part.starts, strides, strict=True))
        span = _span(part, strides)
        scratch = files.scratch(span * kind.itemsize)
        files.read(chunk.file, chunk.offset + first * kind.itemsize, scratch, chunk.record)
        values = torch.frombuffer(scratch, dtype=kind).as_strided(part.sizes, strides)
        copy_checked(out[index_of(part.within(box))], values, str(chunk.file))


def _span(box: Box, strides: tuple[int, ...]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))


def _parts_that_span(box: Box, strides: tuple[int, ...], max_span: int) -> Iterator[Box]:
    """Divides ``box`` into parts, each within a range of at most ``max_span`` elements."""
    if not box.numel:
        return
    if _span(box, strides) <= max_span or box.numel == 1:
        yield box
        return
    # Halved along the dim with the widest span, so that the halves span less.
    dim = max((d for d, size in enumerate(box.sizes) if size > 1), key=lambda d: strides[d] * (box.sizes[d] - 1))
    half = box.sizes[dim] // 2
    for start, size in ((0, half), (half, box.sizes[dim] - half)):
        starts, sizes = list(box.starts), list(box.sizes)
        starts[dim], sizes[dim] = box.starts[dim] + start, size
        yield from _parts_that_span(Box(tuple(starts), tuple(sizes)), strides, max_span)
