"""Stored weights with adapters in PEFT's files merged into them, read in parts: for conversions, and where one process opens a model."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.model.adapted import Adapter, change_of, merge_, row_norms
from shardwise.recipe.boxes import Box, index_of
from shardwise.state.converted import config_of
from shardwise.state.files import OpenFiles
from shardwise.state.formats.safetensors import tensors_in
from shardwise.state.merged_parameters import merged_parameters
from shardwise.state.rounding import copy_checked
from shardwise.state.stored import Chunk, Source, TensorSource
from shardwise.state.stored_parts import Assembled, view_of_all
from shardwise.techniques.lora.options import LoRA
from shardwise.techniques.lora.peft_folder import adapter_folder
from shardwise.techniques.lora.peft_parameters import OF_ATTENTION
from shardwise.techniques.lora.peft_tensors import PREFIX, config_in

# Ends of the classes of transformers that have one.
_HAS_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining")
_FIX = "give the base that the adapter was trained beside: base_model_name_or_path in adapter_config.json may name it"


def with_adapter(source: Source, folder: Path, model_of: Callable[[], nn.Module | None] = lambda: None) -> Source:
    """Weights with the adapters of a directory merged into them, and with what was trained in full beside these.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        model_of: makes the model that the base is of, if it is known: for adapters of parameters.
    """
    found = adapter_folder(folder)
    tensors, stored = dict(source.tensors), tensors_in(folder / "adapter_model.safetensors")
    there = _names_in(source, [*(_weight_of(layer, found.layers) for layer in found.layers), *found.beside])
    lora = LoRA(**found.option)
    for layer, parts in found.layers.items():
        if layer in found.tables:
            raise UnsupportedError(
                f"{folder}: an adapter of {layer}, merged into stored weights",
                why="it is an embedding, whose weight may be the head's too",
                fix="merge it in a model: sw.parallelize(..., lora=sw.LoRA.of(folder)), sw.load_adapter, sw.save_weights",
            )
        name = there[_weight_of(layer, found.layers)]
        base, low, high = _base(source, name, folder), stored[parts["lora_A"]], stored[parts["lora_B"]]
        shape = (high.shape[0], low.shape[1])
        is_turned = found.fan_in_fan_out if shape[0] == shape[1] else base.shape == shape[::-1]
        if base.shape != (shape[::-1] if is_turned else shape):
            raise CheckpointError(
                f"{folder}: an adapter of a layer of shape {list(shape)}",
                why=f"{source.place} has {list(base.shape)} there",
                fix=_FIX,
                name=name,
            )
        others = [
            other
            for other, tensor in source.tensors.items()
            if other != name and base.origins and tensor.origins == base.origins
        ]
        if others:
            raise UnsupportedError(
                f"{folder}: an adapter merged into a weight that is also {others[0]}",
                why="the names are tied to one tensor, and the adapter is beside one of them",
                fix="use the base with the adapters beside it, as PEFT does",
                name=name,
            )
        how = Adapter(lora.scale_of(layer.replace(OF_ATTENTION, "")), out_dim=int(is_turned))
        vector = parts.get("lora_magnitude_vector")
        copy = stored.get(f"{PREFIX}{layer}.base_layer.weight", base)  # which PEFT loads in place of the base's
        tensors[name] = _Merged(base.shape, base.dtype, copy, low, high, stored[vector] if vector else None, how)
    if found.stacks:
        tensors |= merged_parameters(source, found, stored, folder, model_of())
    beside = {there[name]: stored[key] for name, key in found.beside.items()}
    tied = _tied(source, beside)
    if not tied:
        _refuse_half_tied(source, beside, folder)
    for name, values in beside.items():  # trained in full, in the dtype of the base
        if name not in tied:
            base = _base(source, name, folder)
            tensors[name] = Assembled(base.shape, base.dtype, ((view_of_all(name, base.shape), values),))
    return replace(source, tensors=tensors)


def _weight_of(layer: str, layers: Collection[str]) -> str:
    """The name of the weight that an adapter is of, by what is before ``lora_A`` in its keys."""
    if f"{layer}{OF_ATTENTION}" in layers:  # nn.MultiheadAttention, both of whose projections have one
        return f"{layer}.in_proj_weight"
    return f"{layer}.weight".replace(OF_ATTENTION, ".out_proj")


def _names_in(source: Source, wanted: list[str]) -> dict[str, str]:
    """Name of a tensor as the adapters have it -> as the source has it: a part before all of them may be there or not, such as ``model``."""
    firsts = {name.partition(".")[0] for name in wanted}
    edits = [lambda name: name]
    edits += [lambda name, first=first: name.removeprefix(f"{first}.") for first in sorted(firsts)]
    edits += [
        lambda name, first=first: f"{first}.{name}" for first in sorted({n.partition(".")[0] for n in source.tensors})
    ]
    # The first of equals: as they are.
    best = max(edits, key=lambda edit: sum(edit(name) in source.tensors for name in wanted))
    return {name: best(name) for name in wanted}


def _tied(source: Source, beside: Mapping[str, TensorSource]) -> set[str]:
    """Names of tensors that were trained in full and that the source stores once, for several names: the others of such a tie."""
    found = set()
    with OpenFiles() as files:
        for name in (name for name in beside if name not in source.tensors):
            others = [
                beside[other]
                for other in beside
                if other in source.tensors and beside[other].shape == beside[name].shape
            ]
            if any(torch.equal(beside[name].load(files), other.load(files)) for other in others):
                found.add(name)
    return found


def _refuse_half_tied(source: Source, beside: Mapping[str, TensorSource], folder: Path) -> None:
    """Raises CheckpointError for a table of tokens that was trained in full, where the model's head is the same tensor: PEFT trains a copy, and
    the head keeps the base's values."""
    config = config_of(source.folder, None) if source.folder is not None else {}
    rows, kinds = config.get("vocab_size"), config.get("architectures") or _HAS_HEAD
    has_head = any(kind.endswith(_HAS_HEAD) for kind in kinds)
    if (
        rows is None
        or not has_head
        or config_in(folder).get("ensure_weight_tying")
        or beside.keys() - source.tensors.keys()
    ):
        return
    for name, values in beside.items():
        others = [other for other, tensor in source.tensors.items() if other != name and tensor.shape == values.shape]
        is_tied = config.get("tie_word_embeddings", not others)  # not every configuration says it
        if is_tied and len(values.shape) == 2 and values.shape[0] == rows:
            raise CheckpointError(
                f"{folder}: {name} trained apart from the model's head",
                why=f"{source.place} has one tensor for both (tie_word_embeddings), and PEFT trained a copy for one of them: merged, the other "
                "would change too",
                fix="use the base with the adapters beside it, as PEFT does; or train them with LoraConfig(ensure_weight_tying=True)",
                name=name,
            )


def _base(source: Source, name: str, folder: Path) -> TensorSource:
    if name not in source.tensors:
        raise CheckpointError(
            f"{folder}: an adapter beside {name}",
            why=f"{source.place} has no such tensor, nor one tied to it; names there look like {next(iter(source.tensors), 'nothing')}",
            fix=_FIX,
            name=name,
        )
    return source.tensors[name]


@dataclass(frozen=True, eq=False)
class _Merged(TensorSource):
    """A weight with its adapter merged into it, in float32 or more, rounded once. The product is made as a whole, so that values do not
    depend on the box that is read."""

    base: TensorSource
    low: TensorSource
    high: TensorSource
    magnitude: TensorSource | None
    how: Adapter

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return (*self.base.origins, *self.low.origins, *self.high.origins)

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        change, factor = _whole(self, files)
        part = self.base.load(files, box)
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        merge_(part, index_of(box), change, factor, self.how)
        copy_checked(out, part, "a merged weight")


@functools.lru_cache(maxsize=1)  # of the tensor that is being written
def _whole(of: _Merged, files: OpenFiles) -> tuple[Tensor, Tensor | None]:
    """What an adapter adds to its weight, and by what it multiplies each output (DoRA)."""
    low, high = of.low.load(files), of.high.load(files)
    change = change_of(low, high, of.how)
    if of.magnitude is None:
        return change, None
    norms = row_norms(of.base.load(files), low, high, of.how)
    return change, of.magnitude.load(files).to(norms.dtype) / norms
