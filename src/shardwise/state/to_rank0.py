"""Gathers sharded tensors on rank 0.

Each piece is sent once, by its first owner, directly to rank 0: nothing is gathered on ranks that do not need it. Which
rank holds what follows from the recipe alone.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.large_pages import empty_in_large_pages
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime
from shardwise.recipe import Slice, extents, owners
from shardwise.state.packed import packed_of


def gather_tensors(runtime: Runtime, items: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor | None]:
    """Gathers sharded tensors: yields each in full on rank 0's CPU, None elsewhere. All ranks must call it, with the
    same names, and iterate to the end.

    The next tensors are sent while one is assembled; contiguous pieces are received directly into the result.

    Args:
        items: a parameter's name, and this rank's shard: of the parameter, or of the optimizer's state for it.
    """
    act = _receive if runtime.world.is_main else _send
    under_way: deque[_Gathering] = deque()
    num_bytes = 0
    for name, local in items:
        under_way.append(act(runtime, name, local))
        num_bytes += under_way[-1].num_bytes
        while num_bytes > _IN_FLIGHT and len(under_way) > 1:
            num_bytes -= under_way[0].num_bytes
            yield under_way.popleft().finish()
    while under_way:
        yield under_way.popleft().finish()


def full_tensors(runtime: Runtime, names: Iterable[str]) -> dict[str, Tensor]:
    """Name -> full tensor on rank 0's CPU, of parameters, of buffers and, unpacked one by one, of packed weights; ``{}`` elsewhere. All
    ranks must call it."""
    weights, names = packed_of(runtime), list(names)
    unpacked: dict[str, Tensor] = {}
    for name in (name for name in names if name in weights):
        values = full_tensors(runtime, weights[name].parts.values())
        if values:
            unpacked[name] = weights[name].decode(values)
    names = [name for name in names if name not in weights]
    params = [name for name in names if name in runtime.recipe.params]
    gathered = gather_tensors(runtime, ((name, runtime.local_tensor_of(name)) for name in params))
    whole = {name: tensor for name, tensor in zip(params, gathered, strict=True) if tensor is not None}
    if not runtime.world.is_main:
        return {}
    rest = [name for name in names if name not in whole]
    local = runtime.local_tensors() if rest else {}  # it walks through the module
    return whole | unpacked | {name: local[name].detach().cpu().clone() for name in rest}


def computed_of_full(runtime: Runtime, names: Sequence[str], compute: Callable[..., Tensor]) -> Tensor:
    """The result of ``compute`` with the full values of these parameters, on the CPU of every rank; rank 0 alone has them, and computes
    it, so that it does not depend on the layout. All ranks must call it."""
    values = full_tensors(runtime, names)
    result = compute(*(values[name] for name in names)) if runtime.world.is_main else None
    return runtime.world.broadcast(result).cpu()


_IN_FLIGHT = 64 << 20  # bytes that are sent or expected at a time


@dataclass
class _Gathering:
    whole: Tensor | None = None
    works: list[Any] = field(default_factory=list)
    packed: list[tuple[Tensor, list[Slice]]] = field(default_factory=list)  # received in one buffer, to be copied
    num_bytes: int = 0

    def finish(self) -> Tensor | None:
        for work in self.works:
            work.wait()
        for buffer, pieces in self.packed:
            assert self.whole is not None
            counts = [math.prod(piece.sizes) for piece in pieces]
            for piece, part in zip(pieces, buffer.cpu().split(counts), strict=True):
                self.whole[piece.full_index] = part.view(piece.sizes)
        return self.whole


def _send(runtime: Runtime, name: str, local: Tensor) -> _Gathering:
    pieces = _pieces_to_send(runtime, name, runtime.world.rank)
    if not pieces:
        return _Gathering()
    parts = [local[piece.local_index] for piece in pieces]
    straight = len(parts) == 1 and parts[0].is_contiguous()
    wire = (parts[0] if straight else torch.cat([part.reshape(-1) for part in parts])).to(runtime.world.message_device)
    return _Gathering(works=[dist.isend(bytes_of(wire), dst=0)], num_bytes=wire.numel() * wire.itemsize)


def _receive(runtime: Runtime, name: str, local: Tensor) -> _Gathering:
    device = runtime.world.message_device
    whole = empty_in_large_pages(runtime.recipe.params[name].shape, local.dtype)
    found = _Gathering(whole)
    for rank in range(1, runtime.world.size):
        pieces = _pieces_to_send(runtime, name, rank)
        if not pieces:
            continue
        place = whole[pieces[0].full_index]
        if len(pieces) == 1 and place.is_contiguous() and device.type == "cpu":
            wire = place
        else:
            wire = torch.empty(sum(math.prod(piece.sizes) for piece in pieces), dtype=local.dtype, device=device)
            found.packed.append((wire, pieces))
        found.works.append(dist.irecv(bytes_of(wire), src=rank))
        found.num_bytes += wire.numel() * wire.itemsize
    for piece in runtime.view.extents(name):
        whole[piece.full_index] = local[piece.local_index].cpu()
    return found


def _pieces_to_send(runtime: Runtime, name: str, rank: int) -> list[Slice]:
    """The pieces whose first holder is ``rank``; for ranks other than 0, those that it sends to rank 0."""
    param, coord = runtime.recipe.params[name], runtime.recipe.grid.coord(rank)
    return [
        piece for piece, holders in zip(extents(param, coord), owners(param, coord), strict=True) if holders[0] == rank
    ]
