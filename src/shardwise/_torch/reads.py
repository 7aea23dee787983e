"""Reads of values by the host. Each read of a device's memory waits until the device has done all that it was given."""

from collections.abc import Sequence

import torch
from torch import Tensor


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors``, all of one dtype, each flattened and on the CPU; with one read of each device that has some of them."""
    found = [tensor.reshape(-1) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        at = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        read = torch.cat([found[i] for i in at]).cpu()
        for i, piece in zip(at, read.split([found[i].numel() for i in at]), strict=True):
            found[i] = piece
    return found
