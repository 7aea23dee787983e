"""Warns where all ranks train on the same samples, as with a DataLoader without a DistributedSampler and equal seeds.

The first windows that do not come from a Loader are compared by a digest, in an exchange that is made anyway. Data that
does not change (a benchmark's, one batch to overfit on) is accepted.
"""

import warnings
import zlib

import torch
from torch import Tensor

from shardwise.parallel import Runtime
from shardwise.step.loss import Batch

__all__ = ["digest_of_data", "judge_data"]

_WINDOWS = 3  # equal ones in a row; two ranks may draw the same few samples once
_BYTES = 1 << 16  # of each tensor, from its start


def digest_of_data(runtime: Runtime, batches: list[Batch]) -> int:
    """A digest of this rank's first and last micro-batch; 0 where there is nothing to compare."""
    if runtime.same_data is None or runtime.world.axis("dp").size == 1 or not batches:
        return 0
    if any(getattr(batch, "window", None) is not None for batch in batches):  # of a Loader: each rank has others
        return runtime.world.rank
    found = 1
    for batch in batches[:: max(1, len(batches) - 1)]:
        for name in sorted(batch, key=str):
            found = zlib.crc32(_bytes_of(batch[name], runtime.world.rank), zlib.crc32(str(name).encode(), found))
    return found


def _bytes_of(value: object, rank: int) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    if value.layout is not torch.strided or value.is_meta or type(value) is not Tensor:
        return repr(rank).encode()  # not read: assumed to differ
    part = value.detach().reshape(-1)[: _BYTES // value.element_size()]
    return repr(tuple(value.shape)).encode() + part.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def judge_data(runtime: Runtime, digest: int, is_same: bool) -> None:
    """Warns on rank 0 if the windows so far were equal on all ranks, and not all the same. All ranks decide the
    same."""
    seen = runtime.same_data
    if seen is None:
        return
    if not is_same or runtime.world.axis("dp").size == 1 or len(seen) > 2 * _WINDOWS:
        runtime.same_data = None
        return
    seen.append(digest)
    if len(set(seen)) < _WINDOWS:
        return
    runtime.same_data = None
    if runtime.world.is_main:
        size = runtime.world.axis("dp").size
        warnings.warn(
            f"all {size} ranks were given the same samples in {_WINDOWS} windows: each counts {size} times, and a step learns from 1/{size} "
            "of the data it seems to. Pass the dataset to sw.Loader(dataset, world, ...), which gives each rank its own; or give a DataLoader "
            "sampler=DistributedSampler(dataset), and call its set_epoch(epoch) in every epoch.",
            stacklevel=5,
        )
