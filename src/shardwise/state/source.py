"""``open_source``: opens weights of any supported kind as a :class:`~shardwise.state.stored.Source`. Only this file
knows all kinds."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.config.conversion import FOREIGN
from shardwise.config.folders import is_checkpoint
from shardwise.errors import CheckpointError, UsageError
from shardwise.state.extra_state import EXTRA_STATE
from shardwise.state.formats.dcp import METADATA, open_dcp
from shardwise.state.formats.folder import open_folder
from shardwise.state.formats.safetensors import looks_like_safetensors, open_safetensors
from shardwise.state.formats.torch_file import looks_like_torch, open_torch_file
from shardwise.state.formats.trees import MODELS, flatten, root_of, weights_in
from shardwise.state.integrity.manifest import Manifest, folder_name, steps_in
from shardwise.state.integrity.reading import VerifiedCheckpoint, VerifiedFiles
from shardwise.state.left_base import FROZEN, base_of
from shardwise.state.stored import InMemoryTensor, Source

_RUN, _FURTHER = "training", "extra"  # folders of a checkpoint


def open_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Source:
    """Opens weights; only names, shapes, dtypes and places are read, no values.

    Args:
        source: a Hugging Face model directory, a checkpoint, a run's directory of checkpoints (the newest is used), a
            DCP directory, a safetensors file, a file of ``torch.save``, or a state dict.
    """
    if isinstance(source, Mapping):
        return _open_mapping(source)
    if not isinstance(source, str | os.PathLike):
        raise UsageError(
            f"weights from a {type(source).__name__}",
            why="that is neither a path nor a state dict",
            fix="pass a path, or a mapping of names to tensors; where rank 0 alone has one, shared_files=False",
        )
    path = Path(source)
    folder = path if path.is_dir() else path.parent  # a checkpoint, even a damaged one, or one of its weights
    homes = (folder, *([folder.parents[1]] if folder.parent.name == _FURTHER else []))
    home = next(filter(is_checkpoint, homes), None) if path.exists() else None
    if home is not None:
        return _open_checkpoint(path, home)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"weights from {path}", why="there is no such file or directory", fix="check the path")
    if not path.is_file():
        raise CheckpointError(
            f"weights from {path}",
            why="it is neither a file nor a directory",
            fix="give the path of a file or a directory",
        )
    return _open_file(path)


def _open_checkpoint(path: Path, home: Path) -> Source:
    """Opens weights in a checkpoint; their headers and the files next to them have been compared with their checksums.

    Args:
        path: a directory or a file of weights.
    """
    path, home = path.resolve(), home.resolve()  # `latest` may soon point elsewhere
    verified = VerifiedCheckpoint(home, Manifest.read(home))
    names = verified.manifest.files
    if path.is_file():
        checked, rest = [path.relative_to(home).as_posix()], {}
    else:
        beside = {name for name in names if (home / name).parent == path}
        checked = sorted(beside)
        rest = _left_out(verified) if path == home else {}
    with VerifiedFiles(verified) as files:
        files.check_heads(checked)
        left = files.whole(home / FROZEN) if FROZEN in names and path.parent != home / _FURTHER else None
    source = open_safetensors(path) if path.is_file() else open_folder(path)
    base = None if left is None else base_of(left, home / FROZEN).place
    return replace(source, kind="a checkpoint", left_out={**source.left_out, **rest}, verified=verified, left_base=base)


def _left_out(verified: VerifiedCheckpoint) -> dict[str, str]:
    tops = {tuple(name.split("/")[:2]) for name in verified.manifest.files if "/" in name}
    found = {}
    if any(top == _RUN for top, _ in tops):
        found[_RUN] = "training state is not a weight"
    found |= {
        f"{top}/{name}": f"weights of another model: name {verified.folder / top / name} to have them"
        for top, name in sorted(tops)
        if top == _FURTHER
    }
    return found


def _open_folder(path: Path) -> Source:
    weights = any(path.glob("*.safetensors")) or any(path.glob("*.index.json"))
    if (path / METADATA).exists() and not weights:
        return open_dcp(path)
    below = path / "checkpoints"
    if not weights and below.is_dir() and steps_in(below):
        raise CheckpointError(
            f"weights from {path}",
            why="it is the folder of a run, whose checkpoints are in a subfolder",
            fix=f"name {below}, whose newest is meant then, or one of them",
        )
    steps = [] if weights or any(path.glob("pytorch_model.bin*")) else steps_in(path)
    if steps:  # the newest is meant
        return _open_checkpoint(path / folder_name(steps[-1]), path / folder_name(steps[-1]))
    exported = path / "weights"
    if not any(path.glob("pytorch_model*")) and not weights and exported.is_dir():
        raise CheckpointError(
            f"weights from {path}",
            why="it is the folder of a run, whose weights are in a subfolder",
            fix=f"name {exported}",
        )
    return open_folder(path)


def _open_file(path: Path) -> Source:
    """Opens one file, by its first bytes, since its name says little; files of other kinds are recognised by their
    endings."""
    if path.suffix == ".distcp":
        raise CheckpointError(
            f"weights from {path}", why="it is one file of a DCP directory", fix=f"name the directory: {path.parent}"
        )
    foreign = FOREIGN.get(path.suffix.lower())
    if path.suffix != ".safetensors" and foreign is None:
        if looks_like_torch(path):
            return open_torch_file(path)
        foreign = None if looks_like_safetensors(path) else ""
    if foreign is None:
        return open_safetensors(path)
    raise CheckpointError(
        f"weights from {path}",
        why=f"it is a file for {foreign}, which is not read here"
        if foreign
        else "it begins neither as a safetensors file nor as one by torch.save",
        fix="give a Hugging Face directory, a checkpoint, a .safetensors file, a file by torch.save, or a DCP directory",
    )


def _open_mapping(state: Mapping[str, Any]) -> Source:
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        inner = (getattr(state.get(name), "_metadata", None) for name in MODELS)
        metadata = next((found for found in inner if found is not None), None)
    state, beside = _model_in(state)
    extra = {name: value for name, value in state.items() if _is_extra(name)}
    rest = {name: value for name, value in state.items() if name not in extra}
    for name, value in rest.items():
        if isinstance(value, DTensor):
            raise UsageError(
                "a state dict of sharded tensors",
                why="this rank has a shard of it, and another layout needs other pieces",
                fix="pass the result of sw.full_state_dict(model) with shared_files=False, or weights that were saved",
                name=name,
            )
    for name, value in rest.items():
        if isinstance(value, Tensor) and (
            value.device.type == "meta" or value.layout != torch.strided or value.is_quantized
        ):
            raise UsageError(
                "a state dict with a tensor that is "
                + ("on meta" if value.is_meta else "quantized" if value.is_quantized else f"of layout {value.layout}"),
                why="it has no values that could be copied piece by piece",
                fix="give plain tensors: with values, to_dense(), dequantize()",
                name=name,
            )
    return Source(
        place="a state dict",
        kind="a state dict",
        tensors={name: InMemoryTensor.of(value) for name, value in rest.items() if isinstance(value, Tensor)},
        left_out={n: f"a {type(value).__name__}" for n, value in rest.items() if not isinstance(value, Tensor)}
        | beside,
        extra=extra,
        values={name: value for name, value in rest.items() if not isinstance(value, Tensor)},
        metadata=metadata,
    )


def _model_in(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Name -> value of the model's entries, which may be under a key (``{"model": ..., "epoch": 3}``); and for the
    others, name -> why they are left out. As in files of ``torch.save``."""
    arrays = [name for name, value in state.items() if isinstance(value, np.ndarray)]
    if arrays and not any(isinstance(value, Tensor | Mapping) for value in state.values()):
        raise UsageError(
            f"a state dict of {len(arrays)} NumPy arrays",
            why="weights are tensors",
            fix="{name: torch.from_numpy(array) for name, array in state.items()}",
            name=str(arrays[0]),
        )
    if all(
        isinstance(name, str) and (_is_extra(name) or not isinstance(value, Mapping)) for name, value in state.items()
    ):
        return dict(state), {}
    leaves = flatten(state, "a state dict", max_entries=1 << 24, is_leaf=_is_extra)
    extra = {path: leaf for path, leaf in leaves.items() if _is_extra(path[-1])}
    rest = {path: leaf for path, leaf in leaves.items() if path not in extra}
    root = root_of([path for path, leaf in rest.items() if isinstance(leaf, Tensor)], "a state dict")
    found, beside = weights_in(rest, "a state dict", lambda leaf: isinstance(leaf, Tensor))
    inner = {path[len(root) :]: leaf for path, leaf in extra.items() if path[: len(root)] == root}
    return found | {".".join(path): leaf for path, leaf in inner.items()}, beside


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE
