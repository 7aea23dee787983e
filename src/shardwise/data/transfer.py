"""Copies of micro-batches on the world's device."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Transfer:
    """Copies a micro-batch to a device.

    On cuda the copies are made from page-locked memory by a stream of their own: the host does not wait for them, and the device
    makes them while it still runs what was queued before, such as the optimizer's last step. What is queued after them on
    the caller's stream waits for them.

    Args:
        device: where the copies are.
        pin_memory: False: copies are made from the memory that the tensors are in, by the caller's stream, and the host waits.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool):
        self.device = device
        self._is_own_stream = device.type == "cuda" and pin_memory
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None]:
        """The micro-batch on the device; and on the host, where a copy of it there is kept that nothing else writes."""
        if self.device.type == "cpu":
            return batch, None
        if not self._is_own_stream:
            # What is not locked is the dataset's own memory, which it may write again.
            return {name: value.to(self.device) for name, value in batch.items()}, None
        locked = {name: _page_locked(value) for name, value in batch.items() if not value.is_cuda}
        copies = self._copies(locked)
        there = {name: copies[name] if name in copies else batch[name].to(self.device) for name in batch}
        return there, locked if len(locked) == len(batch) else None

    def _copies(self, locked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            copies = {name: value.to(self.device, non_blocking=True) for name, value in locked.items()}
        theirs = torch.cuda.current_stream(self.device)
        theirs.wait_stream(self._stream)
        for copy in copies.values():
            copy.record_stream(theirs)  # else the next copies are written into its memory before it has been read
        return copies


def _page_locked(tensor: Tensor) -> Tensor:
    """A copy, always: the dataset may write its own tensors again before the device has them."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
