"""Checks the result of a conversion: result and source are read again, and every byte is compared."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.errors import VerifyError
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import blocks, whole
from shardwise.state.converted import ConvertedTensor
from shardwise.state.files import BUFFER
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.source import open_source


def compare(
    place: Path, items: Sequence[ConvertedTensor], reader: VerifiedFiles, progress: Callable[[str, int, int], None]
) -> None:
    """Opens the result like any other source, and compares its tensors with the converted source.

    Raises:
        VerifyError: a tensor differs; with the name of the first.
    """
    result = open_source(place)
    reader.verify_with(result.verified)
    written = {name: (stored.shape, stored.dtype) for name, stored in result.tensors.items()}
    if written != {item.name: (item.stored.shape, item.dtype) for item in items}:
        raise VerifyError(
            f"the converted {place}", why="its names, shapes or dtypes are not the source's", fix="report this as a bug"
        )
    total, done = sum(item.fact.num_bytes for item in items), 0
    ours, theirs = torch.empty(BUFFER, dtype=torch.uint8), torch.empty(BUFFER, dtype=torch.uint8)
    for item in items:
        other = replace(item, stored=result.tensors[item.name])
        for box in blocks(whole(item.stored.shape), BUFFER // DTYPE_BYTES[item.dtype]):
            values = item.block(box, theirs, reader)
            if not torch.equal(other.block(box, ours, reader), values):
                raise VerifyError(
                    f"the converted {place}",
                    why=f"its values at {list(box.starts)} are not the source's",
                    fix="look at the disk, and whether another program writes to the source; nothing was moved to its place",
                    name=item.name,
                )
            done += len(values)
            progress("comparing", done, total)


def forget_pages(paths: Iterable[Path]) -> None:
    """Drops files from the page cache, so that what is compared is read from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
