"""Compares the copies that several ranks hold of one piece of a parameter: replicas, and what tensor parallelism leaves whole.

Gradients are the same on these ranks, so values that are not stay apart in training, and no number tells of it: each rank's
loss falls.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import crc32c
import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.model import dtype_of
from shardwise.model.tensors import bytes_of, checksum
from shardwise.parallel.replicas import marks_of
from shardwise.parallel.runtime import Runtime

Sums = dict[tuple[int, ...], int]  # ranks that hold the same pieces -> a checksum of this rank's copies

_BLOCK = 1 << 24  # bytes, of which a checksum is computed at once: it takes some times as many


def sums_of_copies(runtime: Runtime, local: Mapping[str, Tensor]) -> Sums:
    """Checksums of what this rank stores of the tensors in ``local`` (name -> that part) and others hold too."""
    sums: Sums = {}
    everyone = tuple(range(runtime.world.size))
    for name, tensor in local.items():
        owners = runtime.view.owners(name) if name in runtime.recipe.params else (everyone,)
        for (_, part), holders in zip(runtime.parts(name, tensor), owners, strict=True):
            if len(holders) > 1:
                sums[holders] = checksum_of(part, sums.get(holders, 0))
    return sums


def unequal(runtime: Runtime, sums: Sums) -> tuple[int, ...]:
    """The ranks of copies that are not equal; empty if there are none. The same on all ranks, which must all call it."""
    told = runtime.world.agreement.gather(sums, "comparing copies of parameters")
    groups = sorted({holders for other in told for holders in other})
    return next((ranks for ranks in groups if len({told[rank].get(ranks) for rank in ranks}) > 1), ())


def refuse_other_copies(runtime: Runtime) -> None:
    """Compares the parameters once; all ranks must call it."""
    if runtime.world.size == 1:
        return
    local = {name: runtime.local_tensor_of(name) for name in runtime.parameters}
    ranks = unequal(runtime, sums_of_copies(runtime, local))
    if not ranks:
        return
    name = next(name for name in local if unequal(runtime, sums_of_copies(runtime, {name: local[name]})))
    raise UsageError(
        f"a parameter that ranks {', '.join(map(str, ranks))} hold copies of, with other values on each",
        why="it was set after parallelize by numbers that each rank draws or reads for itself: with the same gradients the "
        "copies would stay apart, and rank 0's alone would be saved",
        fix="set values before parallelize, or in the function that builds the model; read files by sw.load_weights(model, path)",
        name=name,
    )


def refuse_diverged(runtime: Runtime, what: str, names: Iterable[str] | None = None) -> None:
    """Compares the copies of parameters (of ``names``; None: of all) that ranks with other data hold, before ``what`` saves one of them; all
    ranks must call it. Where ranks have the same data, copies may differ by rounding."""
    grid, params = runtime.recipe.grid, runtime.recipe.params
    axes = {
        name: (*grid.shared_axes, *(cut.axis for cut in params[name].cuts))
        for name in (params if names is None else names)
    }
    if all(math.prod(map(grid.degree, set(apart))) == runtime.world.size for apart in axes.values()):
        return
    here = runtime.view.coord
    sums: dict[tuple[Any, ...], int] = {}  # where ranks are that hold the same -> a checksum of it
    for name, apart in axes.items():
        place = tuple((axis, here.index(axis)) for axis in apart)
        sums[place] = checksum_of(runtime.local_tensor_of(name), sums.get(place, 0))
    told = runtime.world.agreement.gather(sums, f"{what}, comparing copies of parameters")
    if all(len({other[place] for other in told if place in other}) == 1 for known in told for place in known):
        return
    marks = {name: marks_of(runtime.local_tensor_of(name)).tolist() for name in axes}
    by_rank = runtime.world.agreement.gather(marks, f"{what}, naming copies that differ")
    for name, apart in axes.items():
        first: dict[tuple[int, ...], int] = {}
        for rank, (mark, square) in enumerate(of_rank[name] for of_rank in by_rank):
            one = first.setdefault(tuple(grid.coord(rank).index(axis) for axis in apart), rank)
            usual, size = by_rank[one][name]
            limit = torch.finfo(dtype_of(params[name].storage)).eps ** 0.5 * max(size, square) ** 0.5
            if not (abs(mark - usual) <= limit or mark == usual or (mark != mark and usual != usual)):
                raise UsageError(
                    f"a parameter that ranks {one} and {rank} hold copies of, with other values on each",
                    why=f"code outside of windows has written it on one of them, or other numbers on each: with the same gradients the copies "
                    f"stay apart, and {what} would have those of one rank",
                    fix="write parameters on all ranks alike, by numbers that world.broadcast() has given to all; and go on from a checkpoint "
                    "from before",
                    name=name,
                )


def checksum_of(tensor: Tensor, before: int = 0) -> int:
    """A checksum of the tensor's bytes, which continues ``before``. On a device it is computed there."""
    blocks = bytes_of(tensor).split(_BLOCK)
    if tensor.device.type == "cpu":
        for block in blocks:
            before = crc32c.crc32c(block.numpy().data, before)
        return before
    found = torch.stack([checksum(block) for block in blocks])  # read by the host once
    return crc32c.crc32c(found.cpu().numpy().data, before)
