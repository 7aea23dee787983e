"""Weights of a model that it stores packed, as other tensors (quantised): plain values are packed when they are loaded, and made of what is
stored when they are saved. How is known to the technique that packs them; here it is asked."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import CheckpointError, errors_about
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box, whole
from shardwise.state.files import OpenFiles
from shardwise.state.rounding import copy_checked
from shardwise.state.stored import Chunk, FileTensor, InMemoryTensor, Source, TensorSource
from shardwise.techniques.fold import acts
from shardwise.techniques.technique import PackedInFile, PackedTensor
from shardwise.world.collectively import collectively

_PACKED = ("int16", "int32")  # dtypes in which small numbers are packed; others of two bytes and more are plain
_TOGETHER = 4 << 20  # numbers of several weights that are reduced in one message


class _Packed:
    """The packed weights of a model, found once."""

    def __init__(self) -> None:
        self.weights: dict[str, PackedTensor] | None = None


def packed_of(runtime: Runtime) -> Mapping[str, PackedTensor]:
    """Weight of the user's module -> how it is stored, of those that are packed."""
    kept = runtime.memory(_Packed)
    if kept.weights is None:
        kept.weights = {name: packed for act in acts() for name, packed in act.codecs(runtime).items()}
    return kept.weights


def parts_of_packed(runtime: Runtime) -> dict[str, str]:
    """Parameter or buffer -> the packed weight that it is a part of."""
    return {part: name for name, packed in packed_of(runtime).items() for part in packed.parts.values()}


def in_weights_place(runtime: Runtime, names: Iterable[str]) -> Iterator[str]:
    """Names in their order, those of the parts of packed weights replaced by the weights': at the place of the first part."""
    homes, seen = parts_of_packed(runtime), set[str]()
    for name in names:
        home = homes.get(name, name)
        if home not in seen:
            seen.add(home)
            yield home


# ---- sources with packed weights ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DecodedTensor(TensorSource):
    """The plain values of a packed weight in files.

    Attributes:
        parts: role -> the stored part, in the shape that a model has it in.
    """

    found: PackedInFile
    parts: Mapping[str, TensorSource]

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return tuple(chunk for part in self.parts.values() for chunk in part.origins)

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        values = self.found.decode(box, lambda role, box: self.parts[role].load(files, box))
        copy_checked(out, values, f"the packed {self.found.name}")


def with_packed(source: Source, settings: Mapping[str, Any] | None, files: OpenFiles) -> Source:
    """``source``, of whose packed weights each is one tensor with the plain values.

    Args:
        settings: ``quantization_config`` of its config.json; None: there is none.
        files: reads small tensors beside them.
    """
    found: dict[str, PackedInFile] = {}
    for act in acts():
        found |= act.packed_in(source.tensors, lambda name: source.tensors[name].load(files), settings, source.place)
    numbers = {stored.dtype for stored in source.tensors.values()}
    if settings is not None and not found and any(DTYPE_BYTES[dtype] == 1 or dtype in _PACKED for dtype in numbers):
        method = str(settings.get("quant_method", "a method that it does not name"))
        raise CheckpointError(
            f"quantised weights from {source.place}: quantization_config in its config.json names {method}",
            why="their small numbers are right only with the scales beside them, in a form that is not read",
            fix="name a directory of the same model that is not quantised; parallelize(..., quantize=) packs what is loaded from it",
        )
    beside = {name for weight in found.values() for name in weight.beside}
    tensors = {name: stored for name, stored in source.tensors.items() if name not in beside}
    for name, weight in found.items():
        parts: dict[str, TensorSource] = {role: InMemoryTensor.of(value) for role, value in weight.made.items()}
        for role, (key, shape) in weight.parts.items():
            parts[role] = _shaped(
                source, key, shape, "float32" if source.tensors[key].num_bytes == 4 * math.prod(shape) else "uint8"
            )
        tensors[name] = DecodedTensor(weight.shape, weight.dtype, weight, parts)
    return replace(source, tensors=tensors) if found else source


def refuse_parts(source: Source, *, fix: str) -> None:
    """Refuses a source with the parts of packed weights, as a model stores them, which say nothing where no such model is."""
    names = [name for act in acts() for name in act.packed_names(source.tensors)]
    if names:
        raise CheckpointError(
            f"weights from {source.place}, with {len(names)} tensors that are parts of packed weights",
            why="their bytes are those of a model that stores its weights quantised",
            fix=fix,
            name=names[0],
        )


def _shaped(source: Source, name: str, shape: tuple[int, ...], dtype: str) -> TensorSource:
    """A stored tensor's bytes as a tensor of another shape and dtype."""
    stored = source.tensors[name]
    if isinstance(stored, InMemoryTensor):
        return InMemoryTensor.of(bytes_of(stored.tensor).view(getattr(torch, dtype)).view(shape))
    if isinstance(stored, FileTensor) and len(stored.chunks) == 1 and stored.chunks[0].strides is None:
        return FileTensor(shape, dtype, (replace(stored.chunks[0], box=whole(shape)),))
    raise CheckpointError(
        f"{source.place}: a packed weight in several pieces",
        why="its bytes are read as they are, from one place",
        fix="give the directory of safetensors files that transformers has written",
        name=name,
    )


# ---- loading -----------------------------------------------------------------------------------------------------------


def as_bytes(stored: TensorSource, packed: PackedTensor) -> dict[str, TensorSource] | None:
    """Canonical name -> source of each part of a weight, if what is stored has the same bytes; else None."""
    if not isinstance(stored, DecodedTensor) or (stored.found.kind, stored.shape) != (packed.kind, packed.shape):
        return None
    return {packed.parts[role]: part for role, part in stored.parts.items()}


def pack_weights(
    runtime: Runtime, sources: Mapping[str, TensorSource], local: Mapping[str, Tensor], place: str, files: OpenFiles
) -> None:
    """Packs plain values into the model: each rank reads its own pieces, and one vector for each weight is reduced over all ranks. All
    ranks must call it.

    Raises:
        CheckpointError: on every rank; values cannot be read or packed.
    """
    world, weights = runtime.world, packed_of(runtime)

    def reader(name: str) -> Callable[[Box], Tensor]:
        return lambda box: sources[name].load(files, box)

    def measured(names: list[str]) -> list[Tensor]:
        found = []
        for name in names:
            with errors_about(name):
                found.append(weights[name].measure(reader(name), local, place))
        return found

    def encode(names: list[str], maxima: list[Tensor]) -> None:
        for name, largest in zip(names, maxima, strict=True):
            with errors_about(name):
                weights[name].encode(reader(name), local, largest, place)

    for names in _groups(weights, sources):
        maxima = collectively(world, "load_weights, reading weights to be packed", lambda names=names: measured(names))
        if world.size > 1:
            flat = torch.cat(maxima).to(world.message_device)
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
            maxima = [*flat.cpu().split([len(each) for each in maxima])]
        collectively(world, "load_weights, packing", lambda names=names, maxima=maxima: encode(names, maxima))


def _groups(weights: Mapping[str, PackedTensor], names: Collection[str]) -> Iterator[list[str]]:
    """Names of weights that are packed together: what is reduced for them is bounded, and the same on all ranks."""
    group: list[str] = []
    size = 0
    for name in names:
        size += math.prod(weights[name].shape) // 64
        group.append(name)
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def loaded_names(runtime: Runtime, names: Collection[str]) -> set[str]:
    """What was loaded, with the packed weights of which all parts were."""
    weights = packed_of(runtime)
    return {*names, *(name for name, packed in weights.items() if {*packed.parts.values()} <= {*names})}
