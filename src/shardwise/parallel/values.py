"""Writes values into the ranks' shards: from a tape, where each rank makes its own, or scattered from rank 0.

Every tensor is first filled with a mark that no initialisation writes, and is checked afterwards, so that a tensor
nobody wrote is an error with its name instead of garbage in the model.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.parallel.marks import mark_unwritten, num_marks
from shardwise.parallel.runtime import Runtime
from shardwise.parallel.tape import Tape
from shardwise.recipe import Slice

__all__ = ["scatter_values", "write_from_tape"]

_MESSAGE_BYTES = 64 << 20  # rank 0 packs about this much at a time: bounds host memory beside the model


def write_from_tape(
    runtime: Runtime, tape: Tape, on_meta: Mapping[str, Tensor], local: Mapping[str, Tensor] | None = None
) -> None:
    """Each rank makes the full values of one tensor at a time and keeps its pieces: no communication.

    Args:
        runtime: of the sharded module, whose tensors are written.
        tape: of the module's construction.
        on_meta: canonical name -> the meta tensor of that construction.
        local: canonical name -> what is written: this rank's part of it; None: all that the module has.
    """
    tape.name_draws(on_meta)
    for name, tensor in (runtime.local_tensors() if local is None else local).items():
        values = tape.values(on_meta[name])
        missing = tape.num_unwritten(on_meta[name], values)
        if missing:
            raise PlanError(
                f"{missing} of {values.numel()} values are not written",
                why="its constructor never writes all of it (torch.empty without an init)",
                fix="initialise it in the constructor, or build the module with real values and pass the module",
                name=name,
            )
        mark_unwritten(tensor)
        full = values.to(tensor.dtype)
        for piece in runtime.pieces(name, full):
            tensor[piece.local_index] = full[piece.full_index].to(tensor.device)


def scatter_values(runtime: Runtime, source: Mapping[str, Any], local: Mapping[str, Tensor] | None = None) -> None:
    """Rank 0 sends every rank the pieces it holds, packed into messages of bounded size; nothing else travels.

    Args:
        runtime: of the sharded module, whose tensors are written. All ranks must call.
        source: on rank 0, canonical name -> full values, a tensor or what is indexed as one; ignored elsewhere.
        local: canonical name -> what is written: this rank's part of it, the same names on every rank; None: all that the
            module has.

    Raises:
        PlanError: a tensor that was not written whole.
    """
    world = runtime.world
    local = runtime.local_tensors() if local is None else local
    if not world.is_main:
        _receive(runtime, local)
        return
    for name, tensor in local.items():
        if isinstance(source[name], Tensor) and tensor.data_ptr() == source[name].data_ptr() and tensor.numel():
            continue  # DDP keeps the module's own tensors: rank 0's are in place
        pieces = {piece: source[name][piece.full_index] for piece in runtime.pieces(name, source[name])}
        _fill(name, tensor, pieces)
    for peer in range(1, world.size):
        _send(runtime, local, source, peer)


def _send(runtime: Runtime, local: Mapping[str, Tensor], source: Mapping[str, Any], peer: int) -> None:
    device = runtime.world.device
    for message in _messages(runtime, local, peer):
        parts = [source[name][piece.full_index].reshape(-1).to(device, message.dtype) for name, piece in message.pieces]
        dist.send(torch.cat(parts).view(torch.uint8), dst=peer)


def _receive(runtime: Runtime, local: Mapping[str, Tensor]) -> None:
    arrived: dict[str, dict[Slice, Tensor]] = {name: {} for name in local}
    left = {name: len(runtime.pieces(name, tensor)) for name, tensor in local.items()}
    for name in [name for name, count in left.items() if not count]:
        _fill(name, local[name], {})
    for message in _messages(runtime, local, runtime.world.rank):
        sizes = [math.prod(piece.sizes) for _, piece in message.pieces]
        packed = torch.empty(sum(sizes), dtype=message.dtype, device=runtime.world.device)
        dist.recv(packed.view(torch.uint8), src=0)
        for (name, piece), part in zip(message.pieces, packed.split(sizes), strict=True):
            arrived[name][piece] = part.view(piece.sizes)
            left[name] -= 1
            if not left[name]:
                _fill(name, local[name], arrived.pop(name))


@dataclass
class _Message:
    """What travels in one send: pieces of tensors of one dtype."""

    dtype: torch.dtype
    pieces: list[tuple[str, Slice]] = field(default_factory=list)
    num_bytes: int = 0


def _messages(runtime: Runtime, local: Mapping[str, Tensor], peer: int) -> Iterator[_Message]:
    """The messages from rank 0 to ``peer``, in order. Both sides make this list, each from its own tensors, so it
    depends on the recipe and the peer only: shards of other ranks may be larger."""
    coord = runtime.recipe.grid.coord(peer)
    open_: dict[torch.dtype, _Message] = {}
    for name, tensor in local.items():
        message = open_.setdefault(tensor.dtype, _Message(tensor.dtype))
        for piece in runtime.pieces(name, tensor, coord):
            message.pieces.append((name, piece))
            message.num_bytes += math.prod(piece.sizes) * tensor.itemsize
        if message.num_bytes >= _MESSAGE_BYTES:
            yield open_.pop(tensor.dtype)
    yield from (message for message in open_.values() if message.num_bytes)


def _fill(name: str, tensor: Tensor, pieces: Mapping[Slice, Tensor]) -> None:
    """Writes ``pieces`` into ``tensor``, and proves that they are all of it: marks that are left must have come along."""
    mark_unwritten(tensor)
    marks = 0
    for piece, values in pieces.items():
        tensor[piece.local_index] = values.to(tensor.device, tensor.dtype)
        marks += num_marks(tensor[piece.local_index])
    if num_marks(tensor) != marks or sum(math.prod(piece.sizes) for piece in pieces) != tensor.numel():
        raise PlanError(
            f"{num_marks(tensor) - marks} of {tensor.numel()} values were not written",
            why="the pieces that rank 0 sent are not all of this rank's tensor",
            fix="make the recipe from this module and layout: parallelize does",
            name=name,
        )
