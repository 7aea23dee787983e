"""What tests of stored weights share: reading a source whole, comparing bytes, and a pickle that would run code."""

import os
from pathlib import Path

import torch

from shardwise.state.files import OpenFiles
from shardwise.state.stored import Source

__all__ = ["Runs", "loaded", "same_bytes"]


def loaded(source: Source) -> dict[str, torch.Tensor]:
    with OpenFiles() as files:
        return {name: stored.load(files) for name, stored in source.tensors.items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


class Runs:
    """A pickle that runs code where it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)
