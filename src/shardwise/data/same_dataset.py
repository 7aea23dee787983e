"""Detects ranks that pass different datasets to their Loader: a list shuffled with a seed per rank, a random split, a
part per rank.

A Loader splits one order of one dataset over the ranks, so some samples would be seen twice, and others never. Datasets
that can be read without side effects (lists, tensors, splits of them) are compared by a digest of a few samples, in an
exchange that is made anyway.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from shardwise.model.tensors import bytes_of

_BYTES = 1 << 16  # of each tensor
_NUM_READ = 17  # samples of a dataset
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _UnknownError(Exception):
    """A value whose bytes are not known to be the same in every process."""


def digest_of_dataset(dataset: Any) -> int:
    """A digest of a dataset's length, of 17 samples from the first to the last, and all indices of a ``Subset``. A dataset of
    the user's own class may draw random numbers when read, so its samples are not read: the digest is of its attributes
    that have an element per sample."""
    found = _of_value(len(dataset), 1)
    own = getattr(dataset, "content_digest", None)  # of ours that are read from a file
    if isinstance(own, int):
        return _of_value(own, found)
    try:
        return _of_dataset(dataset, found)
    except _UnknownError:
        return _of_attributes(dataset, found)


def _of_dataset(dataset: Any, found: int) -> int:
    if type(dataset) is Subset:
        found = _of_value(np.asarray(dataset.indices), found, limit=None)
        try:
            return _of_dataset(dataset.dataset, found)
        except _UnknownError:
            return found
    if type(dataset) not in (list, tuple, TensorDataset, Tensor, np.ndarray):
        raise _UnknownError
    num = len(dataset)
    found = _of_value(num, found)
    for i in sorted({(num - 1) * i // (_NUM_READ - 1) for i in range(_NUM_READ)} if num else ()):
        found = _of_value(dataset[i], found)
    return found


def _of_attributes(dataset: Any, found: int) -> int:
    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        try:
            if len(value) == len(dataset):
                found = _of_dataset(value, found)
        except (TypeError, _UnknownError):
            continue
    return found


def _of_value(value: Any, found: int, limit: int | None = _BYTES) -> int:
    if isinstance(value, str):
        value = value.rpartition("/")[2]  # only the name of a path: folders may differ between nodes
    if isinstance(value, _PLAIN):
        return zlib.crc32(repr(value).encode(), found)
    if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
        part = bytes_of(value.detach().reshape(-1)[: _BYTES // value.element_size()]).cpu().numpy()
        return zlib.crc32(part.tobytes(), zlib.crc32(repr((value.dtype, tuple(value.shape))).encode(), found))
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        part = np.asarray(value).reshape(-1)[: None if limit is None else limit // max(1, value.dtype.itemsize)]
        return zlib.crc32(part.tobytes(), zlib.crc32(repr((value.dtype.str, value.shape)).encode(), found))
    if isinstance(value, Mapping):
        for name in value:
            found = _of_value(value[name], _of_value(name, found))
        return found
    if isinstance(value, list | tuple):
        for each in value:
            found = _of_value(each, found)
        return zlib.crc32(repr(len(value)).encode(), found)
    raise _UnknownError
