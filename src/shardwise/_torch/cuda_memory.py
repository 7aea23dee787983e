"""The history of the CUDA allocator."""

import torch

_MAX_ENTRIES = 200_000


def record_history(on: bool) -> None:
    """Begins or ends to note each allocation with its stack."""
    torch.cuda.memory._record_memory_history("all" if on else None, max_entries=_MAX_ENTRIES)


def dump_history(path: str) -> None:
    """Writes what was noted: a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)
