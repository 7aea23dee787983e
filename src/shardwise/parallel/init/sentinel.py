"""Sentinel values in memory that nothing has written yet, so that a tensor without initialisation is an error with its
name instead of garbage in the model."""

import torch
from torch import Tensor


def fill_with_sentinel(tensor: Tensor, mark: int = 0) -> Tensor:
    """Fills ``tensor`` in place with a value that initialisations rarely write. Mark 0 is NaN, the smallest integer or
    False; mark 1 is another value, to distinguish a mark from a written value that looks like it."""
    if tensor.is_complex():  # which torch does not fill in every dtype
        torch.view_as_real(tensor).fill_(1 if mark else float("nan"))
        return tensor
    if mark:
        return tensor.fill_(1)
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.zero_()
    return tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max)


def num_marks(tensor: Tensor) -> int:
    """How many values of ``tensor`` look like mark 0 of :func:`fill_with_sentinel`. One-byte dtypes have no value to
    spare for a mark: 0."""
    if tensor.numel() == 0 or tensor.dtype.itemsize == 1:
        return 0
    if tensor.is_complex():
        return int(torch.view_as_real(tensor).isnan().any(-1).sum())
    if tensor.is_floating_point():
        return int(tensor.isnan().sum())
    info = torch.iinfo(tensor.dtype)
    return int((tensor == (info.min if tensor.dtype.is_signed else info.max)).sum())
