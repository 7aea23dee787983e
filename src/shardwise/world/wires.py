"""Tensors as what an exchange sends of them, and back: bytes, places in the order of numbers, or numbers wide enough for sums."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LEAST = -(1 << 63)  # of int64; its complement is the largest
_PACKED = 1 << 20  # bytes of a tensor that is sent together with others


def wire_of(tensor: Tensor, how: str) -> Tensor:
    """A tensor as what is sent, flat: its bytes for "rank0", since gloo does not support every dtype; places in the order of numbers for
    extremes; else numbers that a reduction neither rounds nor overflows further than it must."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if how == "rank0":
        # A view of one element keeps a stride above 1.
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if how in ("min", "max"):
        return _places(tensor.reshape(-1), how)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor.reshape(-1).to(torch.int64)
    return tensor.reshape(-1).to(torch.float64 if how == "sum" or tensor.dtype == torch.float64 else torch.float32)


def from_wire(part: Tensor, like: Tensor, how: str) -> Tensor:
    """What has come as ``part``, as a tensor like ``like``."""
    part = part.clone()  # one of a pack may begin at any byte
    if how == "rank0":
        return part.view(like.dtype).view(like.shape)
    if how in ("min", "max"):
        return _at_places(part, like.dtype).view(like.shape)
    if like.is_complex():
        return torch.view_as_complex(part.view(*like.shape, 2)).to(like.dtype)
    return part.view(like.shape).to(like.dtype)


def _places(flat: Tensor, how: str) -> Tensor:
    """Integers in the order of real numbers, int64. NaN lies beyond all of them, as ``torch.maximum`` and ``minimum`` keep it: reductions
    of floats keep it or not by the rank that has it."""
    if flat.dtype == torch.uint64:
        return flat.view(torch.int64) ^ _LEAST
    if not flat.is_floating_point():
        return flat.to(torch.int64)
    wide = flat.to(torch.float64)
    return _mirrored(wide.view(torch.int64)).masked_fill_(wide.isnan(), _LEAST if how == "min" else ~_LEAST)


def _at_places(places: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a dtype that :func:`_places` gave."""
    if dtype == torch.uint64:
        return (places ^ _LEAST).view(dtype)
    return (_mirrored(places).view(torch.float64) if dtype.is_floating_point else places).to(dtype)


def _mirrored(bits: Tensor) -> Tensor:
    """The bits of float64 numbers as integers in their order, and back: of negative ones all bits but the sign are turned."""
    return torch.where(bits < 0, bits ^ ~_LEAST, bits)


def packs_of(wires: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors that are sent together: small ones of one dtype and device."""
    packs: dict[Any, list[int]] = {}
    for i, wire in enumerate(wires):
        is_small = wire.nbytes <= _PACKED
        packs.setdefault((wire.dtype, wire.device, -1 if is_small else i), []).append(i)
    return list(packs.values())
