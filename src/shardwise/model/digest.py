"""A checksum of what a model is given, to compare it between ranks."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.model.tensors import bytes_of

_BYTES = 1 << 16  # of each tensor, from its start and its end


def digest_of_values(values: Mapping[str, object], *, unread: str, before: int = 1) -> int:
    """A checksum of 32 bits.

    Args:
        values: by name.
        unread: what stands for a tensor whose bytes cannot be read.
        before: of what came before.
    """
    found = before
    for name in sorted(values, key=str):
        found = zlib.crc32(_bytes_of(values[name], unread), zlib.crc32(str(name).encode(), found))
    return found


def _bytes_of(value: object, unread: str) -> bytes:
    if not isinstance(value, Tensor):
        text = repr(value)
        return (unread if " at 0x" in text else text).encode()  # an address, which differs in each process
    if value.layout is not torch.strided or value.is_meta or type(value) is not Tensor:
        return unread.encode()
    flat, most = value.detach().reshape(-1), _BYTES // value.element_size()
    part = flat if flat.numel() <= 2 * most else torch.cat([flat[:most], flat[-most:]])
    return repr(tuple(value.shape)).encode() + bytes_of(part).cpu().numpy().tobytes()
