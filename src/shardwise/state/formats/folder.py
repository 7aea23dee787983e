"""Reads Hugging Face model directories: one file of weights, or several with an index that says which tensor is
where."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.config.folders import SIDECARS
from shardwise.errors import CheckpointError
from shardwise.state.files import reading
from shardwise.state.formats.checks import inside, without_doubles
from shardwise.state.formats.safetensors import open_safetensors
from shardwise.state.formats.torch_file import open_torch_file
from shardwise.state.stored import Source, TensorSource

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Naming(NamedTuple):
    """The file names of a kind of directory, and the function that reads one file."""

    weights: str
    index: str
    suffix: str
    part: re.Pattern[str]
    read: Callable[[Path], Source]


_SAFETENSORS = _Naming(
    WEIGHTS, INDEX, ".safetensors", re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors"), open_safetensors
)
_TORCH = _Naming(  # as transformers wrote them before safetensors
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    ".bin",
    re.compile(r"(.+)-(\d{5})-of-(\d{5})\.bin"),
    open_torch_file,
)


def sidecars_of(folder: Path) -> list[Path]:
    """The files next to the weights that belong to the model: its configuration and its tokenizer.

    Raises:
        CheckpointError: one of them is a link out of the directory: its target would be copied along with the weights.
    """
    return [inside(folder, name, folder) for name in SIDECARS if (folder / name).is_file()]


def open_folder(folder: Path) -> Source:
    """Opens a directory of safetensors files as a source; if it has none, of the older files of transformers."""
    naming = _naming(folder)
    index = folder / naming.index
    if (folder / naming.weights).exists():
        files, names = [naming.weights], None
    elif index.exists():
        names = _weight_map(index)
        files = list(dict.fromkeys(names.values()))
    else:
        files, names = _files_without_index(folder), None
    tensors: dict[str, TensorSource] = {}
    homes: dict[str, str] = {}
    left_out: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    for file in files:
        found = naming.read(inside(folder, file, index))
        left_out |= found.left_out
        metadata |= found.metadata or {}
        for name, tensor in found.tensors.items():
            if name in homes:
                raise CheckpointError(
                    f"{folder / file}",
                    why=f"{homes[name]} holds a tensor of that name too",
                    fix="export the model again: a tensor is stored once",
                    name=name,
                )
            tensors[name], homes[name] = tensor, file
    if names is not None:
        _check_index(index, names, homes)
        _check_strays(folder, files, naming)
    return Source(
        place=str(folder),
        kind="a Hugging Face directory",
        tensors=tensors,
        left_out=left_out,
        folder=folder,
        metadata=metadata or None,
    )


def _naming(folder: Path) -> _Naming:
    there = any((folder / name).exists() for name in (WEIGHTS, INDEX)) or any(folder.glob("*.safetensors"))
    older = any((folder / name).exists() for name in (_TORCH.weights, _TORCH.index))
    return _TORCH if older and not there else _SAFETENSORS


def _weight_map(index: Path) -> dict[str, str]:
    try:
        with reading(index):
            content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=without_doubles)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the index {index}", why=f"it is not JSON: {error}"[:300], fix="copy it again"
        ) from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(
            f"the index {index}",
            why="it has no weight_map from names to files",
            fix="export the model again, or name one of the files",
        )
    return names


def _files_without_index(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    parts = [match for name in found if (match := _SAFETENSORS.part.fullmatch(name))]
    stems = {(match[1], match[3]) for match in parts}
    if len(found) == 1 and not parts:
        return found
    if len(parts) == len(found) and len(stems) == 1 and [int(m[2]) for m in parts] == [*range(1, int(parts[0][3]) + 1)]:
        return found
    there = ", ".join(found[:5]) or "no .safetensors file"
    raise CheckpointError(
        f"the directory {folder}",
        why=f"it has neither {WEIGHTS} nor {INDEX}, and its files do not say what belongs together ({there})",
        fix="name the one file to read, or a directory that has them",
    )


def _check_index(index: Path, names: Mapping[str, str], homes: Mapping[str, str]) -> None:
    for name, file in names.items():
        if homes.get(name) != file:
            where = f"it is in {homes[name]}" if name in homes else "no file holds it"
            raise CheckpointError(
                f"the index {index}: in {file}",
                why=f"{where}",
                fix="copy the index and the files of one export",
                name=name,
            )
    extra = next((name for name in homes if name not in names), None)
    if extra is not None:
        raise CheckpointError(
            f"the file {index.parent / homes[extra]}",
            why=f"it holds a tensor that {index.name} does not name: the two are not of one export",
            fix="copy the index and the files of one export",
            name=extra,
        )


def _check_strays(folder: Path, files: list[str], naming: _Naming) -> None:
    """Refuses weight files of another export in the directory: only the user knows which one is meant."""
    stems = {match[1] for file in files if (match := naming.part.fullmatch(file))}
    for path in folder.glob(f"*{naming.suffix}"):
        match = naming.part.fullmatch(path.name)
        if match and match[1] in stems and path.name not in files:
            raise CheckpointError(
                f"the file {path}",
                why=f"{naming.index} does not name it, and it is called as a part of the same model",
                fix="remove it, or copy the index and the files of one export",
            )


# ---- writing: how a directory is laid out --------------------------------------------------------------------------


def lay_out(sizes: Mapping[str, int], max_bytes: int, stem: str = "model") -> dict[str, list[str]]:
    """Divides tensors into files: file -> names of its tensors, in their order, a new file where the next would not
    fit.

    Args:
        max_bytes: largest size of a file's tensors; a larger tensor has a file to itself.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    count = len(groups)
    numbers = [""] if count == 1 else [f"-{i:05}-of-{count:05}" for i in range(1, count + 1)]
    names = [f"{stem}{number}.safetensors" for number in numbers]
    return dict(zip(names, groups, strict=True))


def index_of(layout: Mapping[str, list[str]], total_bytes: int) -> bytes | None:
    """The index file of a directory, which says which tensor is in which file; None if there is only one file."""
    if len(layout) == 1:
        return None
    homes = {name: file for file, names in layout.items() for name in names}
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(homes.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()
