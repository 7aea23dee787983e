"""The whole state of a sharded module on rank 0, put together from the ranks' pieces.

Each piece is sent once, by its first owner, straight to rank 0: nothing is gathered on ranks that do not need it. Names are
canonical; which rank holds what is asked of the recipe alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.anatomy import canonical_modules
from shardwise.parallel import Runtime, runtime_of
from shardwise.recipe import Slice, extents, owners
from shardwise.state.extra import EXTRA_STATE, extra_states
from shardwise.state.load import load_weights
from shardwise.state.report import LoadReport

__all__ = ["full_state_dict", "gather_parameter", "gather_tensor", "load_full_state_dict"]


def full_state_dict(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Any]:
    """Every parameter and persistent buffer, whole, on rank 0's CPU; ``{}`` on the other ranks. All ranks must call it.

    The keys are those of the unsharded module's ``state_dict()``, in its order; tied names map to one tensor. What a module
    adds by ``get_extra_state`` is rank 0's, as it is.

    Args:
        model: from ``parallelize``.
        trainable_only: leave out frozen parameters, buffers and extra states.

    Raises:
        RankError: a rank does not come: it has left, or makes another call.
    """
    runtime = runtime_of(model)
    runtime.check_values()
    # What follows cannot be waited for with a limit: a rank that does not come is named here.
    runtime.world.agreement.sum({}, "full_state_dict, before it is gathered")
    found: dict[str, Any] = {} if trainable_only else extra_states(model)  # on every rank: one may talk to the others
    for name, param in runtime.recipe.params.items():
        if trainable_only and not param.trainable:
            continue
        whole = gather_parameter(runtime, name)
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
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, cast: bool = False
) -> LoadReport:
    """Loads rank 0's whole ``state`` into the shards of all ranks. All ranks must call it; what the others give is not read.

    Rank 0 sends every rank its own pieces, a bounded buffer at a time; no rank holds more than its shards beside that.

    Args:
        model: from ``parallelize``.
        state: name -> tensor, as :func:`full_state_dict` or an unsharded module's ``state_dict()`` gives it.
        strict: False: what is missing or not the model's is left out, and told.
        cast: True: floating values of another dtype than the model stores are converted.

    Raises:
        CheckpointError: on every rank; names, shapes or dtypes that do not fit. Nothing has changed then.
    """
    return load_weights(model, state, strict=strict, cast=cast, shared_files=False)


def gather_parameter(runtime: Runtime, name: str) -> Tensor | None:
    """One parameter, whole, on rank 0's CPU; None elsewhere. All ranks must call it."""
    return gather_tensor(runtime, name, runtime.local_tensors_of(name))


def gather_tensor(runtime: Runtime, name: str, local: Tensor) -> Tensor | None:
    """A tensor that is cut as parameter ``name`` is, whole, on rank 0's CPU; None elsewhere. All ranks must call it.

    Args:
        runtime: of the model.
        name: the parameter.
        local: this rank's part: of the parameter, or of what an optimizer keeps for it.
    """
    world, param = runtime.world, runtime.recipe.params[name]
    if not world.is_main:
        mine = _pieces_to_send(runtime, name, world.rank)
        if mine:
            packed = torch.cat([local[piece.local_index].reshape(-1) for piece in mine])
            dist.send(packed.view(torch.uint8).to(world.device), dst=0)
        return None
    whole = torch.empty(param.shape, dtype=local.dtype)
    for piece in runtime.view.extents(name):
        whole[piece.full_index] = local[piece.local_index].cpu()
    for rank in range(1, world.size):
        pieces = _pieces_to_send(runtime, name, rank)
        if not pieces:
            continue
        counts = [torch.Size(piece.sizes).numel() for piece in pieces]
        packed = torch.empty(sum(counts), dtype=local.dtype, device=world.device)
        dist.recv(packed.view(torch.uint8), src=rank)
        for piece, part in zip(pieces, packed.cpu().split(counts), strict=True):
            whole[piece.full_index] = part.view(piece.sizes)
    return whole


def _pieces_to_send(runtime: Runtime, name: str, rank: int) -> list[Slice]:
    """Pieces that ``rank`` is the first to hold: those rank 0 does not have and gets from it."""
    param, coord = runtime.recipe.params[name], runtime.recipe.grid.coord(rank)
    return [
        piece for piece, holders in zip(extents(param, coord), owners(param, coord), strict=True) if holders[0] == rank
    ]


def _order(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names in the order of the module's own state dict: by module, then parameters, buffers, extra state."""
    wanted = set(names)
    found = []
    for prefix, module in canonical_modules(model):
        for attr in (*module._parameters, *module._buffers, EXTRA_STATE):
            name = f"{prefix}.{attr}" if prefix else attr
            if name in wanted:
                found.append(name)
    return found
