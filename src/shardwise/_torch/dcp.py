"""The record of ``torch.distributed.checkpoint`` (DCP) that says where a chunk lies, which has no public name."""

from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo


def place_of_chunk(file: str, offset: int, num_bytes: int) -> Any:
    """The value in ``Metadata.storage_data`` for a chunk at ``offset`` of a file."""
    return _StorageInfo(file, offset, num_bytes)
