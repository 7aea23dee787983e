"""Full state dicts: the full tensors of a sharded module on rank 0, assembled from the ranks' shards, and loaded back.

Each piece is sent once, by its first owner, directly to rank 0: nothing is gathered on ranks that do not need it. Names
are canonical; which rank holds what follows from the recipe alone.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model import canonical_modules
from shardwise.model.large_pages import empty_in_large_pages
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime, runtime_of
from shardwise.recipe import Slice, extents, owners
from shardwise.state.extra import EXTRA_STATE, extra_states
from shardwise.state.load import load_weights
from shardwise.state.match_names import Rename
from shardwise.state.report import LoadReport

__all__ = ["full_state_dict", "gather_tensors", "load_full_state_dict"]


def full_state_dict(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Any]:
    """The full state dict of a sharded model: every parameter and persistent buffer, unsharded, on rank 0's CPU; ``{}``
    on the other ranks. All ranks must call it.

    The keys are those of the unsharded module's ``state_dict()``, in its order; tied names map to one tensor. The
    result of a module's ``get_extra_state`` is that of rank 0, unchanged.

    Args:
        model: from ``parallelize``.
        trainable_only: leave out frozen parameters, buffers and extra states.

    Raises:
        RankError: a rank does not take part: it has exited, or makes another call.
    """
    runtime = runtime_of(model)
    runtime.check_values()
    # The sends that follow have no timeout: a rank that does not take part is named here.
    runtime.world.agreement.sum({}, "full_state_dict, before it is gathered")
    found: dict[str, Any] = {} if trainable_only else extra_states(model)  # on every rank: it may communicate
    wanted = {name: param for name, param in runtime.recipe.params.items() if param.trainable or not trainable_only}
    gathered = gather_tensors(runtime, ((name, runtime.local_tensor_of(name)) for name in wanted))
    for (name, param), whole in zip(wanted.items(), gathered, strict=True):
        if whole is not None:
            found.update(dict.fromkeys((name, *param.aliases), whole))
    if not runtime.world.is_main:
        return {}
    if not trainable_only:
        local = runtime.local_tensors()
        for name, buffer in runtime.recipe.buffers.items():
            if buffer.persistent:
                found.update(dict.fromkeys((name, *buffer.aliases), local[name].detach().cpu().clone()))
    return {name: found[name] for name in _order(model, found) if name in found}


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, rename: Rename = (), cast: bool = False
) -> LoadReport:
    """Loads a full state dict on rank 0 into the shards of all ranks. All ranks must call it; the ``state`` of the
    others is ignored.

    Rank 0 sends every rank its pieces, a bounded buffer at a time; apart from that no rank holds more than its shards.

    Args:
        model: from ``parallelize``.
        state: name -> tensor, as from :func:`full_state_dict` or an unsharded module's ``state_dict()``.
        strict: False: names that are missing, or not the model's, are left out and reported.
        rename: as for :func:`load_weights`.
        cast: True: floating values of another dtype than the model stores are converted.

    Raises:
        CheckpointError: on every rank; names, shapes or dtypes do not fit. Nothing has changed then.
    """
    return load_weights(model, state, strict=strict, rename=rename, cast=cast, shared_files=False)


def gather_tensors(runtime: Runtime, items: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor | None]:
    """Gathers sharded tensors: yields each in full on rank 0's CPU, None elsewhere. All ranks must call it, with the
    same names, and iterate to the end.

    The next tensors are sent while one is assembled; contiguous pieces are received directly into the result.

    Args:
        runtime: of the model.
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


_IN_FLIGHT = 64 << 20  # bytes that are sent or expected at a time


@dataclass
class _Gathering:
    """One tensor that is being sent or received."""

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


def _order(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Sorts names in the order of the module's own state dict: by module, then parameters, buffers, extra state."""
    wanted = set(names)
    found = []
    for prefix, module in canonical_modules(model):
        for attr in (*module._parameters, *module._buffers, EXTRA_STATE):
            name = f"{prefix}.{attr}" if prefix else attr
            if name in wanted:
                found.append(name)
    return found
