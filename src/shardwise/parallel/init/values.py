"""Writes values into the ranks' shards: from a tape, where each rank makes its own, or scattered from rank 0.

Every tensor is first filled with a mark that initialisations rarely write, and is checked afterwards, so that a tensor
that was not written is an error with its name instead of garbage in the model.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.parallel.init.sentinel import fill_with_sentinel, num_marks
from shardwise.parallel.init.tape import Tape
from shardwise.parallel.runtime import Runtime
from shardwise.recipe import Slice

_MESSAGE_BYTES = 64 << 20  # sent at a time, and held in addition to the model


def write_from_tape(
    runtime: Runtime, tape: Tape, on_meta: Mapping[str, Tensor], local: Mapping[str, Tensor] | None = None
) -> None:
    """Each rank makes the full values of one tensor at a time and keeps its pieces: no communication.

    Args:
        runtime: of the sharded module, whose tensors are written.
        tape: of the module's construction.
        on_meta: canonical name -> the meta tensor of that construction.
        local: canonical name -> this rank's part of a tensor to write; None: all tensors of the module.
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
        fill_with_sentinel(tensor)
        full = values.to(tensor.dtype)
        for piece in runtime.pieces(name, full):
            tensor[piece.local_index] = full[piece.full_index].to(tensor.device)


PartOf = Callable[[str, Slice], Tensor]


def scatter_values(
    runtime: Runtime, part_of: PartOf, local: Mapping[str, Tensor] | None = None, *, in_place: Collection[str] = ()
) -> None:
    """Rank 0 sends every rank the pieces it holds, packed into messages of bounded size; nothing else is sent.

    Args:
        runtime: of the sharded module, whose tensors are written. All ranks must call.
        part_of: from a canonical name and a piece of that tensor to its values; called only on rank 0, once for each
            rank that holds the piece.
        local: canonical name -> this rank's part of a tensor to write, the same names on every rank; None: all tensors
            of the module.
        in_place: names of tensors whose part on rank 0 has its values already.
    """
    world = runtime.world
    local = runtime.local_tensors() if local is None else local
    if not world.is_main:
        _receive(runtime, local)
        return
    for name, tensor in local.items():
        if name in in_place:
            continue
        arriving = _Arriving(name, tensor)
        for piece in runtime.pieces(name, tensor):
            for part in piece.blocks(_MESSAGE_BYTES // tensor.itemsize):
                arriving.put(part, part_of(name, part))
        arriving.check()
    for peer in range(1, world.size):
        _send(runtime, local, part_of, peer)


def _send(runtime: Runtime, local: Mapping[str, Tensor], part_of: PartOf, peer: int) -> None:
    device = runtime.world.message_device
    for message in _messages(runtime, local, peer):
        parts = [part_of(name, piece).reshape(-1).to(device, message.dtype) for name, piece in message.pieces]
        dist.send(torch.cat(parts).view(torch.uint8), dst=peer)


def _receive(runtime: Runtime, local: Mapping[str, Tensor]) -> None:
    arriving = {name: _Arriving(name, tensor) for name, tensor in local.items()}
    for message in _messages(runtime, local, runtime.world.rank):
        sizes = [math.prod(piece.sizes) for _, piece in message.pieces]
        packed = torch.empty(sum(sizes), dtype=message.dtype, device=runtime.world.message_device)
        dist.recv(packed.view(torch.uint8), src=0)
        for (name, piece), values in zip(message.pieces, packed.split(sizes), strict=True):
            arriving[name].put(piece, values.view(piece.sizes))
    for tensor in arriving.values():
        tensor.check()


@dataclass
class _Message:
    """The content of one send: pieces of tensors of one dtype."""

    dtype: torch.dtype
    pieces: list[tuple[str, Slice]] = field(default_factory=list)
    num_bytes: int = 0


def _messages(runtime: Runtime, local: Mapping[str, Tensor], peer: int) -> Iterator[_Message]:
    """The messages from rank 0 to ``peer``, in order. Both sides make this list, each from its own tensors, so it
    depends only on the recipe and the peer: shards of other ranks may be larger."""
    coord = runtime.recipe.grid.coord(peer)
    open_: dict[torch.dtype, _Message] = {}
    for name, tensor in local.items():
        for piece in runtime.pieces(name, tensor, coord):
            for part in piece.blocks(_MESSAGE_BYTES // tensor.itemsize):
                size = math.prod(part.sizes) * tensor.itemsize
                message = open_.setdefault(tensor.dtype, _Message(tensor.dtype))
                if message.num_bytes and message.num_bytes + size > _MESSAGE_BYTES:
                    yield message
                    message = open_[tensor.dtype] = _Message(tensor.dtype)
                message.pieces.append((name, part))
                message.num_bytes += size
    yield from (message for message in open_.values() if message.num_bytes)


class _Arriving:
    """A tensor written piece by piece, which checks that all of it was: marks that remain must be received values."""

    def __init__(self, name: str, tensor: Tensor):
        self.name, self.tensor = name, fill_with_sentinel(tensor)
        self.num_marks = self.numel = 0

    def put(self, piece: Slice, values: Tensor) -> None:
        self.tensor[piece.local_index] = values.to(self.tensor.device, self.tensor.dtype)
        self.num_marks += num_marks(self.tensor[piece.local_index])
        self.numel += values.numel()

    def check(self) -> None:
        """Raises PlanError if a value was not written."""
        unwritten = num_marks(self.tensor) - self.num_marks
        if unwritten or self.numel != self.tensor.numel():
            raise PlanError(
                f"{unwritten} of {self.tensor.numel()} values were not written",
                why="the pieces that rank 0 sent are not all of this rank's tensor",
                fix="make the recipe from this module and layout: parallelize does",
                name=self.name,
            )
