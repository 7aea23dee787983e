"""Stored weights of experts with the adapters of their parameters merged into them: files may hold each expert by itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.model.adapted_parameters import OfParameter, merge_parameter_
from shardwise.recipe.boxes import Box, index_of
from shardwise.state.files import OpenFiles
from shardwise.state.hugging_face import stored_views
from shardwise.state.rounding import copy_checked
from shardwise.state.stored import Chunk, Source, TensorSource
from shardwise.state.stored_parts import View, view_of_all
from shardwise.techniques.lora.options import LoRA
from shardwise.techniques.lora.peft_folder import AdapterFolder
from shardwise.techniques.lora.peft_parameters import meant


def merged_parameters(
    source: Source, found: AdapterFolder, factors: Mapping[str, TensorSource], folder: Path, model: nn.Module | None
) -> dict[str, TensorSource]:
    """Name in ``source`` -> its values with an adapter merged into them.

    Args:
        found: what the directory of adapters has.
        model: what the weights are of, with values or without: it says which parameters a key means, and what files call them.
    """
    if not found.stacks:
        return {}
    if model is None:
        raise UnsupportedError(
            f"{folder}: adapters of {', '.join(found.parameters)}, merged into stored weights",
            why=f"which parameters of {next(iter(found.stacks))} they are, its module says, and no config.json beside the weights says what that is",
            fix="merge them in a model: sw.parallelize(..., lora=sw.LoRA.of(folder)), sw.load_adapter, sw.save_weights",
        )
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    names, lora, modules = meant(found.parameters, shapes), LoRA(**found.option), dict(model.named_modules())
    adapters: dict[str, tuple[TensorSource, TensorSource, OfParameter]] = {}
    for host, keys in found.stacks.items():
        own = [f"{host}.{each}" for each in getattr(modules.get(host), "_parameters", ()) if f"{host}.{each}" in names]
        if len(own) != len(keys):
            raise CheckpointError(
                f"{folder}: adapters of {len(keys)} parameters of {host}",
                why=f"the model has {len(own)} of the names {', '.join(found.parameters)} there",
                fix="give the base that the adapter was trained beside",
                name=host,
            )
        for name, parts in zip(own, keys, strict=True):
            how = OfParameter.read(modules[host], shapes[name], lora.scale_of(name))
            adapters[name] = factors[parts["lora_A"]], factors[parts["lora_B"]], how
    views = {name: view_of_all(name, shape) for name, shape in shapes.items() if name in source.tensors}
    if not adapters.keys() <= views.keys():
        views = {name: view for name, view in stored_views(model, shapes).items() if name in source.tensors}
    merged: dict[str, TensorSource] = {}
    for name, view in views.items():
        if view.name in adapters:
            base = source.tensors[name]
            merged[name] = _MergedPart(base.shape, base.dtype, base, view, *adapters[view.name])
    _refuse_left(adapters, shapes, views, source, folder)
    return merged


def _refuse_left(
    adapters: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    views: Mapping[str, View],
    source: Source,
    folder: Path,
) -> None:
    """Refuses a base that does not have all of a parameter, or of another shape."""
    for name in adapters:
        parts = {stored: view for stored, view in views.items() if view.name == name}
        wrong = [stored for stored, view in parts.items() if view.shape != source.tensors[stored].shape]
        if wrong or sum(view.box.numel for view in parts.values()) != torch.Size(shapes[name]).numel():
            raise CheckpointError(
                f"{folder}: an adapter of {name}, of shape {list(shapes[name])}",
                why=f"{source.place} has {list(source.tensors[wrong[0]].shape)} as {wrong[0]}"
                if wrong
                else f"{source.place} does not have all of it",
                fix="give the base that the adapter was trained beside: base_model_name_or_path in adapter_config.json may name it",
                name=name,
            )


@dataclass(frozen=True, eq=False)
class _MergedPart(TensorSource):
    """A part of a parameter with its adapter merged into it, in float32 or more, rounded once."""

    base: TensorSource
    view: View
    low: TensorSource
    high: TensorSource
    how: OfParameter

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return (*self.base.origins, *self.low.origins, *self.high.origins)

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        part = self.base.load(files, box)
        starts, sizes = list(self.view.box.starts), [1] * len(self.view.box.sizes)
        for dim, start, size in zip(self.view.dims, *box, strict=True):
            starts[dim], sizes[dim] = starts[dim] + start, size
        values = torch.empty(sizes, dtype=torch.promote_types(part.dtype, torch.float32))
        turned = self.view.turned(values)
        turned.copy_(part)
        index = index_of(Box(tuple(starts), tuple(sizes)))
        merge_parameter_(self.low.load(files), self.high.load(files), self.how, [(index, values)])
        copy_checked(out, turned, "a merged weight")
