"""The plan of a model's weight files: name, file and offset of every tensor, and which rank writes which part of it.

Every rank makes it from the recipe, and the shapes that buffers have on rank 0, so that all have the same plan.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from shardwise.errors import UnsupportedError
from shardwise.model import dtype_name
from shardwise.parallel import Runtime
from shardwise.recipe import DTYPE_BYTES, extents, owners
from shardwise.recipe.boxes import Box, blocks, common, whole
from shardwise.state.formats.folder import INDEX, WEIGHTS, index_of, lay_out
from shardwise.state.formats.safetensors import CODES, Placed, place_tensors
from shardwise.state.naming import naming_of, shapes_of
from shardwise.state.own_values import Stored, stored_tensors
from shardwise.state.packed import packed_of
from shardwise.state.stored import is_rounded
from shardwise.state.stored_parts import View
from shardwise.techniques.technique import PackedTensor

SHARD_BYTES = 5 << 30  # default for the largest size of a file
BLOCK = 32 << 20  # bytes that one holder of a piece writes before the next holder's turn

Form = Literal["stored", "plain", "packed"]
"""Of packed weights: their parts as the model has them; their plain values; or their bytes as another library reads them."""


@dataclass(frozen=True)
class PlannedFile:
    """A file to be written: its header, its tensors, its size in bytes."""

    name: str
    head: bytes
    tensors: tuple[Placed, ...]
    size: int


@dataclass(frozen=True)
class FileLayout:
    """All files of a model, and the view of the model's tensors that each stored tensor is."""

    files: tuple[PlannedFile, ...]
    views: Mapping[str, View]
    computed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of what is computed on rank 0
    weights: Mapping[str, PackedTensor] = field(default_factory=dict)  # whose plain values are written

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def entry(self) -> str:
        """The file that a reader opens first."""
        return WEIGHTS if len(self.files) == 1 else INDEX

    def index(self) -> bytes | None:
        """The index file, which says which tensor is in which file; None if there is only one file."""
        total = sum(tensor.num_bytes for file in self.files for tensor in file.tensors)
        return index_of({file.name: [tensor.name for tensor in file.tensors] for file in self.files}, total)


@dataclass(frozen=True)
class Part:
    """A part that one rank writes: ``box`` of the model's tensor, which is at ``local`` of the rank's local tensor,
    goes to ``stored`` of ``tensor`` in ``file``."""

    file: PlannedFile
    tensor: Placed
    view: View
    box: Box
    local: tuple[slice, ...]

    @property
    def stored(self) -> Box:
        return self.view.to_stored(self.box)


def stored_dtypes(stored: Mapping[str, Stored], dtype: str | None = None) -> dict[str, str]:
    """Name -> dtype in the file of all that is stored of a model.

    Args:
        stored: from :func:`~shardwise.state.own_values.stored_tensors`.
        dtype: what floating parameters are written in; None: what they are stored in. Buffers keep theirs: a rounded
            position or running variance makes another model. So do numbers of one byte, which have a separate scale.
    """
    found = {
        name: dtype if dtype is not None and entry.is_weight and is_rounded(entry.dtype) else entry.dtype
        for name, entry in stored.items()
    }
    for name, kind in found.items():
        if kind not in CODES:
            raise UnsupportedError(
                f"weights with a tensor of {kind}",
                why="they are written as safetensors, a format without this dtype",
                fix="torch.save what sw.full_state_dict(model) gives on rank 0; or store real and imaginary part in two parameters",
                name=name,
            )
    return found


def file_layout_of(
    runtime: Runtime,
    *,
    max_shard_bytes: int,
    dtype: str | None = None,
    align: int = 8,
    of_main: bool = True,
    without: Collection[str] = (),
    form: Form = "stored",
) -> FileLayout:
    """Plans a model's files: tensors in the model's order, a new file where the next one would not fit.

    Args:
        max_shard_bytes: largest size of a file's tensors, in bytes; a larger tensor has a file to itself.
        align: as for :func:`~shardwise.state.formats.safetensors.place_tensors`.
        of_main: with the buffers of rank 0: all ranks must call it. Else those of this rank.
        without: canonical names of tensors that are left out.
        form: of packed weights.
    """
    stored = stored_tensors(runtime, runtime.saved_buffers(of_main=of_main), unpacked=form != "stored")
    weights = packed_of(runtime) if form != "stored" else {}
    shapes, made = {}, {}
    if form == "packed":
        stored, shapes, made = _packed_entries(runtime, stored)
    stored = {name: entry for name, entry in stored.items() if entry.key not in without}
    dtypes = stored_dtypes(stored, dtype)
    views = naming_of(runtime.module, {name: entry.shape for name, entry in stored.items()}).views
    facts = {name: (view.shape, dtypes[view.name]) for name, view in views.items()}
    views = {name: replace(view, name=stored[view.name].key) for name, view in views.items()}
    computed = {entry.key: entry.shape for entry in stored.values() if entry.made_of is not None}
    computed |= {key: tuple(values.shape) for key, values in made.items()}
    modules = None if runtime.own_state is None else runtime.own_state.versions
    files = planned_files(facts, max_shard_bytes=max_shard_bytes, align=align, modules=modules, shapes=shapes)
    return FileLayout(files, views, computed, weights)


def made_for_packed(runtime: Runtime) -> dict[str, Tensor]:
    """Key -> values of what packed files have beside the parts of weights: tables and texts, the same on every rank."""
    return _packed_entries(runtime, {})[2]


def _packed_entries(
    runtime: Runtime, plain: Mapping[str, Stored]
) -> tuple[dict[str, Stored], dict[str, tuple[int, ...]], dict[str, Tensor]]:
    """What packed files have: name -> entry; name -> its shape in the file, where that is not the tensor's; key -> values that are made.
    ``plain``: entries with the plain values of packed weights, which their parts replace."""
    weights, local, facts = packed_of(runtime), runtime.local_tensors(), shapes_of(runtime)
    found: dict[str, Stored] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    made: dict[str, Tensor] = {}
    for name, entry in (plain or dict.fromkeys(weights)).items():
        if name not in weights:
            assert entry is not None
            found[name] = entry
            continue
        for suffix, part in weights[name].stored(local).items():
            key = part.key or name + suffix
            if part.values is not None:
                made[key] = part.values
            shape = facts[key] if part.values is None else part.shape
            dtype = dtype_name(local[key].dtype if part.values is None else part.values.dtype)
            found[name + suffix] = Stored(key, shape, dtype, False)
            shapes[name + suffix] = part.shape
    return found, shapes, made


def planned_files(
    facts: Mapping[str, tuple[tuple[int, ...], str]],
    *,
    max_shard_bytes: int,
    align: int = 8,
    stem: str = "model",
    modules: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[PlannedFile, ...]:
    """Plans the files for tensors (name -> shape, dtype), divided as :func:`file_layout_of` says; file names begin with
    ``stem``; ``modules``, ``shapes``: as for :func:`~shardwise.state.formats.safetensors.place_tensors`."""
    sizes = {name: math.prod(shape) * DTYPE_BYTES[kind] for name, (shape, kind) in facts.items()}
    files = []
    for file, names in lay_out(sizes, max_shard_bytes, stem).items():
        head, placed, size = place_tensors({name: facts[name] for name in names}, align, modules, shapes)
        files.append(PlannedFile(file, head, tuple(placed), size))
    return tuple(files)


def parts_of(runtime: Runtime, file_layout: FileLayout, rank: int) -> Iterator[Part]:
    """The parts that ``rank`` writes, file by file. Over all ranks every element is written once: ranks with the same
    piece take turns, and rank 0 writes the buffers, and what is computed."""
    number = 0
    for file in file_layout.files:
        for tensor in file.tensors:
            number += 1
            view = file_layout.views[tensor.name]
            step = max(1, BLOCK // DTYPE_BYTES[tensor.dtype])
            for piece, local, holders in _pieces(runtime, file_layout, view, rank):
                part = common(piece, view.box)
                # The turn follows from the tensor's number and the block: all holders of a piece count in the same way.
                for turn, box in enumerate(blocks(part, step) if part is not None else (), start=number):
                    if holders[turn % len(holders)] == rank:
                        inner = box.within(piece)
                        index = tuple(
                            slice(a + b, a + b + n) for a, b, n in zip(local, inner.starts, inner.sizes, strict=True)
                        )
                        yield Part(file, tensor, view, box, index)


def _pieces(
    runtime: Runtime, file_layout: FileLayout, view: View, rank: int
) -> list[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """``(box of the model's tensor, where it begins in the rank's local tensor, ranks that hold it)`` of each piece."""
    if (weight := file_layout.weights.get(view.name)) is not None:
        return [(piece.box, piece.local_starts, holders) for piece, holders in weight.pieces(rank)]
    param = runtime.recipe.params.get(view.name)
    if param is None:
        found = file_layout.computed.get(view.name)
        box = view.box if found is None else whole(found)
        return [(box, box.starts, (0,))]
    coord = runtime.recipe.grid.coord(rank)
    pieces = zip(extents(param, coord), owners(param, coord), strict=True)
    return [(piece.box, piece.local_starts, holders) for piece, holders in pieces]
