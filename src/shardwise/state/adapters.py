"""Saves and loads the adapters of a sharded model without its base, in the files of PEFT: ``adapter_model.safetensors`` and
``adapter_config.json``."""

import contextlib
import functools
import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.config.caller import level_of_caller
from shardwise.config.folders import check_place
from shardwise.config.keywords import public_call
from shardwise.errors import CheckpointError, UsageError, errors_about
from shardwise.model import dtype_name, dtype_of
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.copies import refuse_diverged
from shardwise.parallel.init.values import scatter_values
from shardwise.recipe import Slice
from shardwise.state.files import OpenFiles, writing
from shardwise.state.formats.safetensors import place_tensors, tensors_in
from shardwise.state.load_transaction import load_transaction, refuse_left_half
from shardwise.state.misfits import may_be
from shardwise.state.naming import naming_of, shapes_of
from shardwise.state.origin import Origin, others
from shardwise.state.report import LoadReport
from shardwise.state.staging import Staged, StagedSave, resolved
from shardwise.state.to_rank0 import full_tensors
from shardwise.state.writing import opened, write_at, write_file
from shardwise.techniques.fold import acts
from shardwise.techniques.technique import AdapterFiles
from shardwise.world.collectively import collectively

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@public_call({"safe_serialization": "leave it out: files are safetensors"})
def save_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Saves the adapters of a sharded model, and what is trained in full beside them, as PEFT does. All ranks must call it.

    ``PeftModel.from_pretrained(base, folder)`` reads the directory, and so does :func:`load_adapter`. It appears complete or not at all;
    other files of an older one are kept, and one with weights or a checkpoint is refused. The base is not in it: it is named by the directory that it was loaded from.

    Args:
        model: from ``parallelize(..., lora=...)``.
        folder: the directory; it is made. Rank 0's path is used.

    Returns:
        the path of the file with the tensors.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write, or something of another kind is there.
        UnsupportedError: PEFT's files have no place for what is trained.
        UsageError: a model without adapters.
        RankError: a rank does not take part.
    """
    runtime = runtime_of(model)
    runtime.world.refuse_imagined("save_adapter")
    runtime.check_values()
    files = collectively(runtime.world, "save_adapter, before it begins", lambda: _files_of(runtime, "save_adapter"))
    refuse_diverged(runtime, "save_adapter", dict.fromkeys(files.keys.values()))
    values = full_tensors(runtime, dict.fromkeys(files.keys.values()))
    base, note = _base_of(runtime)
    config = {**files.config, "base_model_name_or_path": base}
    tensors = {key: values[name] for key, name in files.keys.items()} if runtime.world.is_main else {}
    write = functools.partial(_write, Path(folder), tensors, config)
    collectively(runtime.world, "save_adapter, writing", write, on_main=True)
    for text in (files.note, note) if runtime.world.is_main else ():
        if text:
            warnings.warn(text, stacklevel=level_of_caller())
    return Path(folder) / WEIGHTS


@public_call()
def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> LoadReport:
    """Loads adapters that :func:`save_adapter` or PEFT has saved, under any layout. All ranks must call it; rank 0 reads the files, and
    sends every rank its pieces.

    The model must have the same adapters: ``parallelize(..., lora=sw.LoRA.of(folder))`` makes it so. Either everything fits and is loaded,
    or nothing of the model has changed.

    Args:
        model: from ``parallelize(..., lora=...)``, with the values of its base.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        CheckpointError: on every rank; the adapters are others than the model's, or cannot be read.
        UnsupportedError: the directory has what is not supported here.
        UsageError: a model without adapters, or without values yet.
        RankError: a rank does not take part.
    """
    start, runtime, folder = time.perf_counter(), runtime_of(model), Path(folder)
    world = runtime.world
    files = collectively(world, "load_adapter, before it begins", lambda: _files_of(runtime, "load_adapter"))
    if runtime.pending is not None:
        raise UsageError(
            "load_adapter of a model that has no values yet",
            why="adapters are beside a base, and the base was not loaded",
            fix="call sw.load_weights(model, path) of the base first",
        )
    found = collectively(world, "load_adapter, reading", lambda: _read(folder, files, runtime), on_main=True)
    values, cast = found if found is not None else ({}, {})
    names, cast = world.broadcast((list(values), cast))
    refuse_left_half(runtime, str(folder), names)
    local = runtime.local_tensors()

    def part_of(name: str, piece: Slice) -> Tensor:
        return values[name][piece.full_index]

    with load_transaction(runtime, local, names):
        scatter_values(runtime, part_of, {name: local[name] for name in names})
    num_bytes = sum(local[name].numel() * local[name].itemsize for name in names)
    seconds = time.perf_counter() - start
    return LoadReport(place=str(folder), num_tensors=len(names), num_bytes=num_bytes, seconds=seconds, cast=cast)


def check_adapter(model: nn.Module) -> int:
    """Size in bytes of the tensors that :func:`save_adapter` would write; raises UnsupportedError if it could not. No communication, the
    same on every rank."""
    runtime = runtime_of(model)
    names, shapes, local = _files_of(runtime, "save_adapter").keys.values(), shapes_of(runtime), runtime.local_tensors()
    return sum(math.prod(shapes[name]) * local[name].itemsize for name in names)


def _files_of(runtime: Runtime, call: str) -> AdapterFiles:
    prefix = naming_of(runtime.module, shapes_of(runtime)).prefix
    files = next((files for act in acts() if (files := act.adapter_files(runtime, prefix)) is not None), None)
    if files is None:
        raise UsageError(
            f"{call} of a model without adapters",
            why="it stores adapters, which parallelize(..., lora=...) puts beside the layers of a model",
            fix="use save_weights and load_weights for all weights of a model",
        )
    return files


def _base_of(runtime: Runtime) -> tuple[str | None, str]:
    """The directory of the base beside which the adapters are, if its frozen weights are as they came from there; and a note for the user."""
    folder = runtime.memory(Origin).folder
    found = others(runtime) if folder is not None else []
    if found:
        return None, (
            f"the adapters are beside a base that is in no directory, and adapter_config.json names none: {found[0]}, one of {len(found)}, "
            f"does not have the value of {folder}; sw.save_weights(model, DIRECTORY) saves the base too"
        )
    return str(folder) if folder is not None and folder.is_dir() else None, ""


def _write(dest: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """On rank 0: writes both files, and moves the directory to its place."""
    dest = resolved(dest, "adapters")
    check_place(dest, "adapter")
    with writing(f"adapters to {dest}", StagedSave.then), contextlib.closing(Staged(dest)) as staged:
        facts = {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
        head, placed, _ = place_tensors(facts)
        with opened(staged.path / WEIGHTS, os.O_CREAT) as descriptor:
            write_at(descriptor, memoryview(head), 0)
            for place in placed:
                write_at(descriptor, bytes_of(tensors[place.name].contiguous()).numpy().data, place.offset)
            os.fsync(descriptor)
        write_file(staged.path / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())
        staged.commit("adapter")


def _read(folder: Path, files: AdapterFiles, runtime: Runtime) -> tuple[dict[str, Tensor], dict[str, tuple[str, str]]]:
    """On rank 0: canonical name -> its full value, and of those whose dtype is converted: (there, here)."""
    files.check(folder)
    stored = tensors_in(folder / WEIGHTS)
    values: dict[str, Tensor] = {}
    cast: dict[str, tuple[str, str]] = {}
    keys: dict[str, str] = {}
    with OpenFiles() as opened_files:
        for key, name in {**files.keys, **{key: name for key, name in files.beside.items() if key in stored}}.items():
            found, (shape, dtype) = stored.get(key) or stored[f"{key}.weight"], _facts_of(runtime, name)
            if found.shape != shape or not may_be(found.dtype, dtype, cast=key in files.beside or "lossless"):
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {key} is {found.dtype} of shape {list(found.shape)}",
                    why=f"the model has {dtype} of shape {list(shape)} there",
                    fix="build the base that these adapters were trained beside"
                    + ("" if found.shape != shape else f", in {found.dtype}: values would be rounded"),
                    name=name,
                )
            with errors_about(name):
                value = found.load(opened_files).to(dtype_of(dtype))
            if name in values and not torch.equal(bytes_of(values[name]), bytes_of(value)):
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {key} differs from {keys[name]}",
                    why="the model ties these names: it has one tensor for both",
                    fix="build the model without that tie, tie_word_embeddings=False in its configuration",
                    name=name,
                )
            values[name], keys[name] = value, key
            if found.dtype != dtype:
                cast[name] = (found.dtype, dtype)
    return values, cast


def _facts_of(runtime: Runtime, name: str) -> tuple[tuple[int, ...], str]:
    """The shape and dtype of a parameter, or of a buffer as it is now."""
    param = runtime.recipe.params.get(name)
    return runtime.saved_buffers()[name] if param is None else (param.shape, param.storage)
