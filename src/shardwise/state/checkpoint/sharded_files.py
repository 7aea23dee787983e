"""The files of a checkpoint with tensors that are cut over the ranks: of a model's weights, an optimizer's state, extra objects."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from shardwise.model import dtype_name
from shardwise.parallel import Runtime, runtime_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.state.checkpoint.extra_objects import CutTensors
from shardwise.state.file_layout import (
    SHARD_BYTES,
    FileLayout,
    Part,
    PlannedFile,
    file_layout_of,
    parts_of,
    planned_files,
)
from shardwise.state.formats.folder import INDEX
from shardwise.state.own_values import computed_values, not_stored
from shardwise.state.sidecars import sidecar_files
from shardwise.state.stored_parts import view_of_all
from shardwise.state.writing import stretches

EXACT, CUT = "training/exact", "training/extra"
ALIGN = 1 << 20  # bytes: large tensors begin at multiples of it, so that parts of them are whole blocks
PADDED = 64  # the alignment is at most this part (1/64) of a file: its header is padded to it
Take = Callable[[str, Tensor, Callable[[], int]], Tensor]
"""``(name, tensor, offset) -> copy``: ``offset()`` is where the tensor begins in its file."""


@dataclass(frozen=True)
class ShardedFiles:
    """Files of tensors that are sharded like a model's parameters: its weights, or its optimizer state.

    Attributes:
        tensors: this rank's local tensors, by the model's name, or with ``by_stored`` by the name in the file.
    """

    prefix: str
    runtime: Runtime
    file_layout: FileLayout
    tensors: Mapping[str, Tensor]
    by_stored: bool = False

    def parts(self, rank: int) -> Iterator[tuple[str, PlannedFile, Part, Tensor]]:
        """``(path, file, part, values)`` of all that ``rank`` writes, file by file."""
        for part in parts_of(self.runtime, self.file_layout, rank):
            whole = self.tensors[part.tensor.name if self.by_stored else part.view.name]
            yield self.prefix + part.file.name, part.file, part, whole[part.local]

    def staged(self, take: "Take") -> "ShardedFiles":
        """The same group with the copies that ``take`` makes of each tensor that is written; it is called with a unique
        name for each."""
        place = self.prefix + (f"{self.file_layout.files[0].name}/" if self.by_stored else "")
        stored = [tensor.name for file in self.file_layout.files for tensor in file.tensors]
        used = stored if self.by_stored else [self.file_layout.views[name].name for name in stored]
        return replace(
            self,
            tensors={
                name: take(place + name, self.tensors[name], lambda name=name: self._offsets.get(name, 0))
                for name in dict.fromkeys(used)
                if name in self.tensors  # what is computed is on rank 0
            },
        )

    @functools.cached_property
    def _offsets(self) -> dict[str, int]:
        """Where this rank's tensors begin in their files, or would begin if only a part of them is written."""
        found: dict[str, int] = {}
        for _, _, part, values in self.parts(self.runtime.world.rank):
            name = part.tensor.name if self.by_stored else part.view.name
            if name not in found:
                before = values.storage_offset() - self.tensors[name].storage_offset()
                offset = next((offset for offset, _ in stretches(part, values)), 0)
                found[name] = offset - int(before) * values.element_size()
        return found


def weight_files(
    prefix: str, model: nn.Module, texts: dict[str, bytes], notes: list[str], without: Collection[str] = ()
) -> list[ShardedFiles]:
    """The weights as they are stored, but those of ``without``, and the tensors of the model that are not stored as they are."""
    runtime = runtime_of(model)
    params = runtime.recipe.params.values()
    align = _align(sum(math.prod(param.shape) * DTYPE_BYTES[param.storage] for param in params))
    file_layout = file_layout_of(runtime, max_shard_bytes=SHARD_BYTES, align=align, without=without)
    sidecars, told = sidecar_files(runtime)
    if without:  # else transformers would open it, and draw what is not there
        sidecars.pop("config.json", None)
    index = file_layout.index()
    texts |= {prefix + name: content for name, content in sidecars.items()}
    texts |= {prefix + INDEX: index} if index is not None else {}
    notes += told
    local = runtime.local_tensors()
    groups = [ShardedFiles(prefix, runtime, file_layout, {**local, **computed_values(runtime, "a checkpoint")})]
    if exact := not_stored(runtime):
        every = {name: (param.shape, param.storage) for name, param in runtime.recipe.params.items()}
        every |= runtime.saved_buffers(of_main=True)
        layout = _layout({name: (name, *every[name]) for name in exact}, align, EXACT)
        groups.append(ShardedFiles(prefix, runtime, layout, {name: local[name] for name in exact}))
    return groups


def cut_files(cut: CutTensors, stem: str) -> list[ShardedFiles]:
    """The files of tensors that are cut as parameters are: those of each model by itself."""
    made = []
    for number, (runtime, tensors) in enumerate(cut.found.values()):
        params = runtime.recipe.params
        facts = {n: (name, params[name].shape, dtype_name(tensor.dtype)) for n, (name, tensor) in tensors.items()}
        align = _align(sum(math.prod(shape) * DTYPE_BYTES[dtype] for _, shape, dtype in facts.values()))
        layout, own = _layout(facts, align, f"{stem}{number or ''}"), {n: tensor for n, (_, tensor) in tensors.items()}
        made.append(ShardedFiles("", runtime, layout, own, by_stored=True))
    return made


def _layout(facts: Mapping[str, tuple[str, tuple[int, ...], str]], align: int, stem: str) -> FileLayout:
    """The files of full tensors: name in the files -> the model's tensor that it is or is cut as, shape, dtype."""
    files = planned_files(
        {name: fact[1:] for name, fact in facts.items()}, max_shard_bytes=SHARD_BYTES, align=align, stem=stem
    )
    return FileLayout(files, {name: view_of_all(home, shape) for name, (home, shape, _) in facts.items()})


def _align(num_bytes: int) -> int:
    """The alignment of files with ``num_bytes`` of tensors: a power of two, equal on every rank."""
    return min(ALIGN, max(16, 1 << max(num_bytes // PADDED, 1).bit_length() - 1))
