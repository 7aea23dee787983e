"""Writes values into the ranks' shards: from a tape, where each rank makes its own, or scattered from rank 0.

Every tensor is first filled with a mark that no initialisation writes, and is checked afterwards, so that a tensor
nobody wrote is an error with its name instead of garbage in the model.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.parallel.runtime import Runtime
from shardwise.parallel.tape import Tape, has_unwritten, mark_unwritten

__all__ = ["scatter_values", "write_from_tape"]

_BUCKET_BYTES = 64 << 20  # rank 0 packs at most this much for one peer: bounds host memory beside the model


def write_from_tape(runtime: Runtime, tape: Tape, on_meta: Mapping[str, Tensor]) -> None:
    """Each rank makes the full values of one tensor at a time and keeps its pieces: no communication.

    Args:
        runtime: of the sharded module, whose tensors are written.
        tape: of the module's construction.
        on_meta: canonical name -> the meta tensor of that construction.
    """
    tape.name_draws(on_meta)
    for name, local in runtime.local_tensors().items():
        mark_unwritten(local)
        full = tape.values(on_meta[name]).to(local.dtype)
        for piece in runtime.pieces(name, full):
            local[piece.local_index] = full[piece.full_index].to(local.device)
        _check_written(name, full, "its constructor never writes all of it (torch.empty without an init)")


def scatter_values(runtime: Runtime, source: Mapping[str, Tensor]) -> None:
    """Rank 0 sends every rank the pieces it holds, tensor by tensor in buckets; nothing else travels.

    Args:
        runtime: of the sharded module, whose tensors are written. All ranks must call.
        source: on rank 0, canonical name -> full values; ignored elsewhere.
    """
    world = runtime.world
    locals_ = runtime.local_tensors()
    if world.rank == 0:
        for name, local in locals_.items():
            _check_written(name, source[name], "its values on rank 0 are NaN, or the smallest integer")
            if local.data_ptr() == source[name].data_ptr() and local.numel():
                continue  # DDP keeps the module's own tensors: rank 0's are in place
            mark_unwritten(local)
            for piece in runtime.pieces(name, source[name]):
                local[piece.local_index] = source[name][piece.full_index].to(local.device, local.dtype)
    else:
        for local in locals_.values():
            mark_unwritten(local)
    for bucket in _buckets(locals_):
        for peer in range(1, world.size):
            if world.rank == 0:
                _send(runtime, bucket, source, peer)
            elif world.rank == peer:
                _receive(runtime, bucket, locals_)
    for name, local in locals_.items():
        _check_written(name, local, "rank 0 did not send all of it")


def _send(runtime: Runtime, bucket: list[str], source: Mapping[str, Tensor], peer: int) -> None:
    coord = runtime.recipe.grid.coord(peer)
    for dtype, names in _by_dtype(bucket, runtime).items():
        parts = [
            source[name][piece.full_index].reshape(-1).to(runtime.world.device, dtype)
            for name in names
            for piece in runtime.pieces(name, source[name], coord)
        ]
        if parts and (packed := torch.cat(parts)).numel():
            dist.send(packed.view(torch.uint8) if packed.numel() else packed, dst=peer)


def _receive(runtime: Runtime, bucket: list[str], locals_: Mapping[str, Tensor]) -> None:
    for dtype, names in _by_dtype(bucket, runtime).items():
        targets = [(locals_[name], piece) for name in names for piece in runtime.pieces(name, locals_[name])]
        count = sum(torch.Size(piece.sizes).numel() for _, piece in targets)
        if not count:
            continue
        packed = torch.empty(count, dtype=dtype, device=runtime.world.device)
        dist.recv(packed.view(torch.uint8), src=0)
        for (local, piece), part in zip(
            targets, packed.split([torch.Size(piece.sizes).numel() for _, piece in targets]), strict=True
        ):
            local[piece.local_index] = part.view(piece.sizes).to(local.device)


def _by_dtype(names: list[str], runtime: Runtime) -> dict[torch.dtype, list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name in names:
        groups.setdefault(runtime.local_tensors()[name].dtype, []).append(name)
    return groups


def _buckets(locals_: Mapping[str, Tensor]) -> list[list[str]]:
    buckets, size = [[]], 0
    for name, local in locals_.items():
        if size > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += local.numel() * local.itemsize
    return buckets


def _check_written(name: str, tensor: Tensor, why: str) -> None:
    if has_unwritten(tensor):
        raise PlanError(
            f"{int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 'some'} of {tensor.numel()} "
            "values were not written",
            why=why,
            fix="initialise it in the constructor, or build the module with real values and pass the module",
            name=name,
        )
