"""Reads directories of ``torch.distributed.checkpoint`` (DCP): ``.metadata`` says where each chunk of each tensor is,
in files that contain, one after another, what ``torch.save`` writes for each chunk (or one safetensors file with all).

``.metadata`` is a pickle, which torch itself executes; here it is only read (``pickles.py``).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, errors_about
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box, common, whole
from shardwise.state.files import reading
from shardwise.state.formats.checks import counts_in, damaged, inside, is_count
from shardwise.state.formats.pickles import Named, name_of, named, read_pickle, shown
from shardwise.state.formats.safetensors import tensors_in
from shardwise.state.formats.torch_file import tensor_in
from shardwise.state.formats.trees import Path as Keys
from shardwise.state.formats.trees import weights_in
from shardwise.state.stored import Chunk, FileTensor, Source

METADATA = ".metadata"
_ROOM = "torch.distributed.checkpoint.metadata."
_OLD = "torch.distributed._shard.sharded_tensor.metadata."  # the module of TensorProperties up to torch 2.2
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES = {f"{room}TensorProperties" for room in (_ROOM, _OLD)}
_KNOWN = {
    *(f"{_ROOM}{kind}" for kind in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "StorageMeta",
      "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    _INFO, *_PROPERTIES, f"{_OLD}MEM_FORMAT_ENCODING", "torch.serialization._get_layout", "torch.device",
    *(f"torch.{dtype}" for dtype in DTYPE_BYTES),
    *(f"{room}.{kind}" for room in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath", "PurePosixPath")),
}  # fmt: skip
_ZIP = b"PK\x03\x04"


def open_dcp(folder: Path) -> Source:
    """Opens a DCP directory as a source; of ``{"model": ..., "optim": ...}`` the model."""
    metadata = folder / METADATA
    content = _fields(_read(metadata), f"{_ROOM}Metadata", metadata)
    entries, storage = content.get("state_dict_metadata"), content.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict) or not all(isinstance(k, str) for k in entries):
        raise damaged(metadata, "its fields", "there are no state_dict_metadata and storage_data", None)
    places = _places(storage, metadata)
    leaves: dict[Keys, tuple[str, Any]] = {}
    for name, path in _paths(entries, content.get("planner_data"), metadata).items():
        if path in leaves:
            raise damaged(metadata, f"the path {path}", f"{leaves[path][0]} has the same", name)
        leaves[path] = (name, entries[name])
    found, left_out = weights_in(leaves, str(metadata), _is_tensor)
    blobs = _Blobs(folder, metadata, places.values())
    tensors = {name: _tensor(stored, entry, places, blobs) for name, (stored, entry) in found.items()}
    return Source(place=str(folder), kind="a DCP directory", tensors=tensors, left_out=left_out)


def _read(metadata: Path) -> Any:
    with reading(metadata):
        inside(metadata.parent, metadata.name, metadata)
        data = metadata.read_bytes()
    return read_pickle(data, str(metadata), _stand_in)


def _stand_in(name: str) -> Any:
    if name == "torch.Size":
        return lambda sizes=(): sizes
    return named(name) if name in _KNOWN else None


def _is_tensor(leaf: tuple[str, Any]) -> bool:
    return isinstance(leaf[1], Named) and leaf[1].name == f"{_ROOM}TensorStorageMetadata"


def _fields(value: Any, kind: str, metadata: Path, name: str | None = None) -> dict[str, Any]:
    if not isinstance(value, Named) or value.name != kind or not isinstance(value.state, dict):
        raise damaged(metadata, shown(value), f"a {kind.rpartition('.')[2]} should stand there", name)
    return value.state


def _paths(entries: Mapping[str, Any], planner_data: Any, metadata: Path) -> dict[str, Keys]:
    """Name -> its keys in the nested state dict that was saved; for a flat one the name itself."""
    given = planner_data if isinstance(planner_data, dict) else {}
    found: dict[str, Keys] = {}
    for name in entries:
        path = given.get(name, (name,))
        if not isinstance(path, tuple) or not path or not all(isinstance(key, str | int) for key in path):
            raise damaged(metadata, shown(path), "the path to an entry is made of names and numbers", name)
        found[name] = tuple(map(str, path))
    return found


def _places(storage: dict[Any, Any], metadata: Path) -> dict[tuple[str, tuple[int, ...]], dict[str, Any]]:
    """(name, where the chunk begins) -> the fields that say where its bytes are."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for index, info in storage.items():
        fields = _fields(index, f"{_ROOM}MetadataIndex", metadata)
        name = fields.get("fqn")
        if not isinstance(name, str):
            raise damaged(metadata, f"an entry {shown(name)}", "an entry has a name", None)
        if fields.get("offset") is None:  # not a tensor
            continue
        place = (name, _counts(fields["offset"], metadata, name))
        if place in found:
            raise damaged(metadata, f"the chunk at {list(place[1])}", "it has two places", name)
        at = found[place] = _fields(info, _INFO, metadata, name)
        numbers = (at.get("offset"), at.get("length"))
        if not isinstance(at.get("relative_path"), str) or not all(map(is_count, numbers)):
            raise damaged(metadata, shown(at), "a place is a file, an offset and a length", name)
    return found


def _tensor(name: str, entry: Named, places: Mapping[Any, dict[str, Any]], blobs: "_Blobs") -> FileTensor:
    fields = _fields(entry, f"{_ROOM}TensorStorageMetadata", blobs.metadata, name)
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Named) and properties.name in _PROPERTIES else None
    kind = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    dtype = (name_of(kind) or "").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise damaged(blobs.metadata, f"dtype {shown(kind)}", "no tensor of it can be read", name)
    shape, chunks = _counts(fields.get("size"), blobs.metadata, name), fields.get("chunks")
    if not isinstance(chunks, list):
        raise damaged(blobs.metadata, "its chunks", "there is no list of them", name)
    boxes = [_box(chunk, shape, blobs.metadata, name) for chunk in chunks]
    if not math.prod(shape):  # an empty tensor
        return FileTensor(shape, dtype, ())
    boxes = [box for box in boxes if box.numel]  # a rank without a row of the tensor may have written an empty chunk
    check_tiling(boxes, shape, blobs.metadata, name)
    stored = []
    for box in boxes:
        if (name, box.starts) not in places:
            raise damaged(blobs.metadata, f"the chunk at {list(box.starts)}", "no file is named for it", name)
        stored.append(blobs.chunk(name, box, dtype, places[name, box.starts]))
    return FileTensor(shape, dtype, tuple(stored))


def _box(chunk: Any, shape: tuple[int, ...], metadata: Path, name: str) -> Box:
    fields = _fields(chunk, f"{_ROOM}ChunkStorageMetadata", metadata, name)
    starts, sizes = (_counts(fields.get(key), metadata, name) for key in ("offsets", "sizes"))
    if len(starts) != len(shape) or len(sizes) != len(shape):
        raise damaged(metadata, f"a chunk of {len(sizes)} dims", f"the tensor has shape {list(shape)}", name)
    return Box(starts, sizes)


def check_tiling(boxes: Iterable[Box], shape: tuple[int, ...], metadata: Path, name: str) -> None:
    """Refuses chunks that do not cover a tensor exactly."""
    boxes = list(boxes)
    all_of_it = whole(shape)
    for box in boxes:
        if common(box, all_of_it) != box:
            given = f"the chunk of {list(box.sizes)} at {list(box.starts)}"
            raise damaged(metadata, given, f"it reaches beyond the tensor, of shape {list(shape)}", name)
    # Swept along the dim that separates them most: only chunks that share a row of it are compared.
    dim = max(range(len(shape)), key=lambda d: len({box.starts[d] for box in boxes}), default=0)
    open_ones: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.starts[dim : dim + 1]):
        open_ones = [
            other for other in open_ones if dim >= len(shape) or other.starts[dim] + other.sizes[dim] > box.starts[dim]
        ]
        for other in open_ones:
            if common(box, other) is not None:
                given = f"the chunks at {list(other.starts)} and {list(box.starts)}"
                raise damaged(metadata, given, "they overlap", name)
        open_ones.append(box)
    held = sum(box.numel for box in boxes)
    if held != math.prod(shape):
        raise damaged(metadata, f"{held} values in chunks", f"the tensor has {math.prod(shape)}: a gap", name)


class _Blobs:
    """The files of a directory, and the chunks in them."""

    def __init__(self, folder: Path, metadata: Path, places: Iterable[Mapping[str, Any]]):
        self.folder, self.metadata = folder, metadata
        files = {info["relative_path"] for info in places}
        self._paths = {file: inside(folder, file, metadata) for file in files}
        self._uses = Counter((info["relative_path"], info["offset"]) for info in places)
        self._pickles: dict[bytes, Any] = {}
        self._packs: dict[tuple[Path, int], dict[str, FileTensor]] = {}

    def chunk(self, name: str, box: Box, dtype: str, info: Mapping[str, Any]) -> Chunk:
        """A box of a tensor and the place of its bytes, from the metadata's fields for it."""
        file, offset, length = info["relative_path"], info["offset"], info["length"]
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{self.metadata}: transformed by {shown(info['transform_descriptors'])}",
                why="of compressed or encrypted chunks no part can be read at its place",
                fix="dcp.load it with the extension it was saved by, and dcp.save it without",
                name=name,
            )
        path = self._paths[file]
        held = self._stored(path, offset, length, name, self._uses[file, offset])
        if held.shape != box.sizes or held.dtype != dtype:
            given = f"{held.dtype} of shape {list(held.shape)}"
            raise damaged(path, given, f"{METADATA} has {dtype} of shape {list(box.sizes)} there", name)
        return replace(held.chunks[0], box=box)

    def _stored(self, path: Path, offset: int, length: int, name: str, num_uses: int) -> FileTensor:
        with errors_about(name), reading(path), path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(offset)
            head = file.read(len(_ZIP))
        if offset + length > size:
            raise damaged(path, f"{length} bytes at {offset}", f"the file has {size}: it is cut off", name)
        if head == _ZIP:
            if num_uses > 1:  # DCP writes tied tensors once per name, so one of these places is wrong
                raise damaged(
                    self.metadata, f"the place {offset} of {path.name}", "several chunks are said to lie there", name
                )
            return tensor_in(path, offset, length, name, self._pickles)
        if (path, offset) not in self._packs:  # SerializationFormat.SAFETENSORS: one file for all tensors of a rank
            self._packs[path, offset] = tensors_in(path, offset)
        held = self._packs[path, offset].get(name)
        if held is None:
            raise damaged(path, f"{length} bytes at {offset}", "the tensor is not there", name)
        return held


def _counts(value: Any, metadata: Path, name: str) -> tuple[int, ...]:
    if (found := counts_in(value)) is None:
        raise damaged(metadata, shown(value), "a shape is made of numbers that are 0 or more", name)
    return found
