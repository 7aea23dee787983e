"""Plans a directory for ``torch.distributed.checkpoint.load`` (DCP): tensors in chunks of rows, each as ``torch.save``
writes it, one after another, and ``.metadata`` that says where they are."""

import pickle
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.model import dtype_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box, blocks, whole
from shardwise.state.formats.dcp import METADATA
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed, Piece
from shardwise.state.targets.torch_file import Layout, without_values

CHUNK = 512 << 20  # bytes: torch reads a whole chunk, even if it needs only a part


class _Blob(NamedTuple):
    """A chunk, the archive that it is written as, and the archive's offset in its file."""

    name: str
    box: Box
    layout: Layout
    file: str
    offset: int


def plan_dcp(facts: Mapping[str, Fact], max_file_bytes: int) -> ConversionPlan:
    """Plans a DCP directory with all tensors as a flat state dict.

    Args:
        max_file_bytes: a new file is begun when one has this many bytes.
    """
    blobs: list[_Blob] = []
    pieces: list[Piece] = []
    sizes: dict[str, int] = {}
    layouts: dict[Fact, Layout] = {}  # most chunks are alike
    number, end = 0, 0
    for name, fact in facts.items():
        for box in (
            blocks(whole(fact.shape), CHUNK // DTYPE_BYTES[fact.dtype]) if fact.num_bytes else [whole(fact.shape)]
        ):
            part = Fact(box.sizes, fact.dtype)
            if end and end + part.num_bytes > max_file_bytes:
                number, end = number + 1, 0
            file = f"__0_{number}.distcp"
            if part not in layouts:
                layouts[part] = Layout(without_values({"": part})[""])
            blobs.append(_Blob(name, box, layouts[part], file, end))
            pieces += [Piece(name, box, fact.dtype, file, end + begin) for begin in layouts[part].begins]
            end += layouts[part].tell()
            sizes[file] = end
    metadata = _metadata(facts, blobs)

    def finish(sums: Sequence[int]) -> list[Fixed]:
        left = iter(sums)
        found = [Fixed(METADATA, 0, metadata)]
        for blob in blobs:
            own = [next(left) for _ in blob.layout.begins]
            found += [Fixed(blob.file, blob.offset + at, data) for at, data in blob.layout.parts(own)]
        return found

    return ConversionPlan({**sizes, METADATA: len(metadata)}, tuple(pieces), finish, summed=True)


def _metadata(facts: Mapping[str, Fact], blobs: list[_Blob]) -> bytes:
    # Here: no other conversion needs them, and they take long to import.
    from torch.distributed.checkpoint import metadata as dcp

    from shardwise._torch.dcp import place_of_chunk

    entries = {
        name: dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype_of(fact.dtype)), torch.Size(fact.shape), [])
        for name, fact in facts.items()
    }
    places = {}
    for blob in blobs:
        chunks, offset = entries[blob.name].chunks, torch.Size(blob.box.starts)
        places[dcp.MetadataIndex(blob.name, offset, len(chunks))] = place_of_chunk(
            blob.file, blob.offset, blob.layout.tell()
        )
        chunks.append(dcp.ChunkStorageMetadata(offset, torch.Size(blob.box.sizes)))
    found = dcp.Metadata(dict(entries), planner_data={name: (name,) for name in facts}, storage_data=places)
    return pickle.dumps(found)
