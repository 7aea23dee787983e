"""A Hugging Face model directory: one file of weights, or several and an index that says what is where."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.state.formats.safetensors import tensors_in
from shardwise.state.stored import Source, Stored

__all__ = ["COMPANIONS", "INDEX", "WEIGHTS", "companions_of", "open_folder"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")

COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "source.spm", "target.spm", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "chat_template.json", "chat_template.jinja", "normalizer.json",
)  # fmt: skip


def companions_of(folder: Path) -> list[Path]:
    """Files beside the weights that belong to the model: its configuration and its tokenizer."""
    return [folder / name for name in COMPANIONS if (folder / name).is_file()]


def open_folder(folder: Path, read: Callable[[Path], Mapping[str, Stored]] = tensors_in) -> Source:
    """A directory of safetensors files as a source.

    Args:
        folder: the directory.
        read: gives the tensors of one file.

    Raises:
        CheckpointError: weights that are not there, or an index that contradicts them; names the file and the tensor.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).exists():
        files, names = [WEIGHTS], None
    elif index.exists():
        names = _weight_map(index)
        files = list(dict.fromkeys(names.values()))
    else:
        files, names = _files_without_index(folder), None
    tensors: dict[str, Stored] = {}
    homes: dict[str, str] = {}
    for file in files:
        for name, tensor in read(_inside(folder, file, index)).items():
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
        _check_strays(folder, files)
    return Source(place=str(folder), kind="a Hugging Face directory", tensors=tensors, folder=folder)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_pairs)
    except OSError as error:
        raise CheckpointError(
            f"the file {index}", why=f"reading failed: {error.strerror or error}", fix="look whether you may read it"
        ) from error
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


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _files_without_index(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    parts = [match for name in found if (match := _PART.fullmatch(name))]
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


def _inside(folder: Path, file: str, index: Path) -> Path:
    """The path of a file that an index names; only one in the directory itself will do. The hub's cache keeps its files
    as links to a folder of blobs that lies beside the snapshots, which is allowed."""
    name = PurePosixPath(file)
    if name.is_absolute() or ".." in name.parts or "\\" in file or not name.parts or "\0" in file:
        raise CheckpointError(
            f"the index {index}: {file!r}",
            why="that leaves the directory of the model",
            fix="do not trust this directory: an index names files that lie beside it",
        )
    path = folder / name
    home = folder.resolve()
    real = path.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not real.is_relative_to(home) and not (blobs is not None and real.is_relative_to(blobs)):
        raise CheckpointError(
            f"{path}",
            why=f"it is a link out of the directory, to {real}",
            fix="copy the file itself there, if you trust it",
        )
    if not real.is_file():
        raise CheckpointError(
            f"{path}", why="there is no such file", fix="copy the missing file, or the directory, again"
        )
    return path


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


def _check_strays(folder: Path, files: list[str]) -> None:
    """A part of another export beside those of this one: which of them is meant, only the user knows."""
    stems = {match[1] for file in files if (match := _PART.fullmatch(file))}
    for path in folder.glob("*.safetensors"):
        match = _PART.fullmatch(path.name)
        if match and match[1] in stems and path.name not in files:
            raise CheckpointError(
                f"the file {path}",
                why=f"{INDEX} does not name it, and it is called as a part of the same model",
                fix="remove it, or copy the index and the files of one export",
            )
