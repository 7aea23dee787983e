"""The same small weights in every kind of source, undamaged."""

import json
import pickle
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

__all__ = ["Good", "copied", "make_good"]


@dataclass(frozen=True)
class Good:
    """The undamaged sources, in one folder: their paths, and what is in each of them."""

    tensors: dict[str, Tensor]
    file: Path  # safetensors
    folder: Path  # safetensors with an index
    torch_file: Path
    torch_folder: Path
    dcp: Path
    marker: Path  # a file that a pickle would make if it were run


def make_good(place: Path) -> Good:
    """All of them. Two tensors have the same shape and dtype, so that one read in place of the other would be seen."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(6, 4, generator=generator), "b.weight": torch.randn(6, 4, generator=generator),
        "c.weight": torch.randn(5, 3, generator=generator).bfloat16(), "d.count": torch.tensor(7), "e.empty": torch.empty(0, 3),
        "f.turned": torch.randn(4, 5, generator=generator).t(), "g.ids": torch.arange(12, dtype=torch.int32),
    }  # fmt: skip
    good = Good(tensors, *(place / name for name in ("m.safetensors", "hf", "m.pt", "bin", "dcp", "ran")))
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, good.file, metadata={"format": "pt"})
    torch.save(tensors, good.torch_file)
    parts = [list(tensors)[:2], list(tensors)[2:5], list(tensors)[5:]]
    for folder, stem, suffix in ((good.folder, "model", "safetensors"), (good.torch_folder, "pytorch_model", "bin")):
        folder.mkdir()
        names = [f"{stem}-{i + 1:05}-of-{len(parts):05}.{suffix}" for i in range(len(parts))]
        for file, part in zip(names, parts, strict=True):
            if suffix == "bin":
                torch.save({name: tensors[name] for name in part}, folder / file)
            else:
                save_file({name: plain[name] for name in part}, folder / file)
        index = {
            "metadata": {"total_size": 1},
            "weight_map": {n: f for f, part in zip(names, parts, strict=True) for n in part},
        }
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=1))
    _save_dcp(tensors, good.dcp)
    return good


def _save_dcp(tensors: dict[str, Tensor], folder: Path) -> None:
    """As three ranks would have: the first two tensors in chunks of two rows."""
    pieces = {f"{name}@{row}": tensors[name][row : row + 2].clone() for name in list(tensors)[:2] for row in (0, 2, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(pieces | dict(list(tensors.items())[2:]), storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for piece in pieces:
        name, row = piece.split("@")
        entry = metadata.state_dict_metadata.pop(piece)
        chunk = ChunkStorageMetadata(torch.Size([int(row), 0]), torch.Size([2, 4]))
        whole = metadata.state_dict_metadata.setdefault(name, entry)
        whole.size, whole.chunks = torch.Size([6, 4]), [*(whole.chunks if whole is not entry else []), chunk]
        info = next(metadata.storage_data.pop(key) for key in list(metadata.storage_data) if key.fqn == piece)
        metadata.storage_data[MetadataIndex(name, torch.Size([int(row), 0]))] = info
        metadata.planner_data.pop(piece)
        metadata.planner_data[name] = (name,)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def copied(good: Path, place: Path) -> Path:
    target = place / good.name
    if good.is_dir():
        shutil.copytree(good, target)
    else:
        shutil.copy(good, target)
    return target
