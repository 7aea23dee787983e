"""Plans a directory for ``torch.distributed.checkpoint.load`` (DCP): tensors in chunks of rows, each as ``torch.save``
writes it, one after another, and ``.metadata`` that says where they are."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box, blocks, whole
from shardwise.state.formats.dcp import METADATA
from shardwise.state.targets.archives import PlannedArchive
from shardwise.state.targets.pickling import Global, Made, pickled
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed, Piece
from shardwise.state.targets.torch_file import described, small_records

__all__ = ["plan_dcp"]

CHUNK = 512 << 20  # bytes: torch reads a whole chunk, even if it needs only a part
_ROOM = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class _Blob:
    """A chunk, the archive that it is written as, and the archive's offset in its file."""

    name: str
    box: Box
    archive: PlannedArchive
    small: Mapping[str, bytes]
    file: str
    offset: int


def plan_dcp(facts: Mapping[str, Fact], max_file_bytes: int) -> ConversionPlan:
    """Plans a DCP directory with all tensors as a flat state dict.

    Args:
        facts: name -> shape and dtype.
        max_file_bytes: a new file is begun when one has this many bytes.
    """
    blobs: list[_Blob] = []
    pieces: list[Piece] = []
    sizes: dict[str, int] = {}
    number, end = 0, 0
    for name, fact in facts.items():
        for box in (
            blocks(whole(fact.shape), CHUNK // DTYPE_BYTES[fact.dtype]) if fact.num_bytes else [whole(fact.shape)]
        ):
            part = Fact(box.sizes, fact.dtype)
            if end and end + part.num_bytes > max_file_bytes:
                number, end = number + 1, 0
            file = f"__0_{number}.distcp"
            archive = PlannedArchive()
            small = {"data.pkl": pickled(described(part, "0")), **small_records()}
            for record, data in small.items():
                archive.add(record, len(data))
            begin = archive.add("data/0", part.num_bytes)
            blobs.append(_Blob(name, box, archive, small, file, end))
            if part.num_bytes:
                pieces.append(Piece(name, box, fact.dtype, file, end + begin))
            end += archive.size
            sizes[file] = end
    metadata = pickled(_metadata(facts, blobs))

    def finish(sums: Sequence[int]) -> list[Fixed]:
        left = iter(sums)
        found = [Fixed(METADATA, 0, metadata)]
        for blob in blobs:
            own = {"data/0": next(left) if blob.box.numel else 0}
            parts = blob.archive.parts({**{name: zlib.crc32(data) for name, data in blob.small.items()}, **own})
            parts += [(blob.archive.begin_of(name), data) for name, data in blob.small.items()]
            found += [Fixed(blob.file, blob.offset + offset, data) for offset, data in parts]
        return found

    return ConversionPlan({**sizes, METADATA: len(metadata)}, tuple(pieces), finish, summed=True)


def _metadata(facts: Mapping[str, Fact], blobs: list[_Blob]) -> Made:
    """The records for torch's ``Metadata``: its dataclasses, by name."""
    chunks: dict[str, list[Made]] = {name: [] for name in facts}
    places: dict[Made, Made] = {}
    for blob in blobs:
        offset = _size(blob.box.starts)
        chunks[blob.name].append(_filled("ChunkStorageMetadata", {"offsets": offset, "sizes": _size(blob.box.sizes)}))
        index = _filled("MetadataIndex", {"fqn": blob.name, "offset": offset, "index": len(chunks[blob.name]) - 1})
        info = {"relative_path": blob.file, "offset": blob.offset, "length": blob.archive.size}
        places[index] = Made(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), (), info)
    entries = {
        name: _filled(
            "TensorStorageMetadata",
            {"properties": _properties(fact.dtype), "size": _size(fact.shape), "chunks": chunks[name]},
        )
        for name, fact in facts.items()
    }
    fields: dict[str, Any] = {
        "state_dict_metadata": entries,
        "planner_data": {name: (name,) for name in facts},
        "storage_data": places,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return _filled("Metadata", fields)


def _filled(kind: str, state: Any) -> Made:
    return Made(Global(_ROOM, kind), (), state)


def _size(sizes: tuple[int, ...]) -> Made:
    return Made(Global("torch", "Size"), (sizes,))


def _properties(dtype: str) -> Made:
    layout = Made(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    rows = Made(Global(_ROOM, "_MEM_FORMAT_ENCODING"), (0,))
    return _filled("TensorProperties", (Global("torch", dtype), layout, False, rows, False))
