"""The whole of a part, put together from those of all ranks."""

import math
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import UsageError
from shardwise.model.tensors import bytes_of
from shardwise.parallel.part_errors import PartOf
from shardwise.parallel.part_functions import whole_sizes
from shardwise.parallel.runtime import Runtime
from shardwise.recipe import Param, extents, local_shape


class _Whole(torch.autograd.Function):
    """The whole of a part, to be read: a gradient of it would count as often as there are ranks that compute it."""

    @staticmethod
    def forward(ctx: Any, _tensor: Tensor, whole: Tensor, part: PartOf) -> Tensor:
        ctx.part = part
        ctx.sides = None, None, "unknown"  # its own backward refuses
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UsageError(
            "a backward through sw.full_tensor(p)",
            why="it is for reading: each rank would add the gradient of a term that counts once",
            fix="a penalty on weights: weight_decay= of the optimizer, or, after the window, p.grad.add_(p.detach(), alpha=0.02); other code that "
            "computes with a parameter belongs into the model's forward",
            name=ctx.part.name,
        )


def _put_together(runtime: Runtime, param: Param, axis_name: str, local: Tensor) -> Tensor:
    """The whole tensor, from the parts of the ranks along an axis; all of them must call it."""
    axis = runtime.world.axis(axis_name)
    coords = [runtime.recipe.grid.coord(rank) for rank in axis.ranks]
    shapes = [local_shape(param, coord) for coord in coords]
    most = max(map(math.prod, shapes)) * local.element_size()
    mine = torch.zeros(most, dtype=torch.uint8, device=local.device)
    mine[: local.nbytes] = bytes_of(local)
    found = [torch.empty_like(mine) for _ in coords]
    runtime.world.agreement.carry_out(
        lambda: [dist.all_gather(found, mine, group=axis.group, async_op=True)], f"full_tensor of {axis_name} parts"
    )
    whole = torch.empty(param.shape, dtype=local.dtype, device=local.device)
    for coord, shape, sent in zip(coords, shapes, found, strict=True):
        given = sent[: math.prod(shape) * local.element_size()].view(local.dtype).view(shape)
        for piece in extents(param, coord):
            whole[piece.full_index] = given[piece.local_index]
    return whole


def _cut_of(tensor: Tensor, part: PartOf | None, function: str) -> tuple[Runtime, Param]:
    """The model that such a part is of, and the parameter that it is cut as, with the cut along its axis alone."""
    runtime = None if part is None else part.runtime()
    if part is None or runtime is None:
        raise UsageError(
            f"{function}() of a part of a model that is no longer there",
            why="which ranks have the other parts is no longer known",
            fix="keep the model for as long as its tensors are used",
        )
    known = runtime.recipe.params[part.name]
    if whole_sizes(tensor, part.cuts) != tuple(known.shape):
        raise UsageError(
            f"{function}() of a tensor of another shape than {part.name}",
            why="how parts are put together is known for tensors that have the parameter's shape",
            fix="give it the parameter, or its gradient: sw.full_tensor(p).t()",
            name=part.name,
        )
    cuts = tuple(cut for cut in known.cuts if cut.axis == part.axis)
    return runtime, msgspec.structs.replace(known, cuts=cuts)


def gathered(tensor: Tensor, part: PartOf | None, **options: Any) -> Tensor:
    """The whole of ``tensor``, which is such a part."""
    runtime, param = _cut_of(tensor, part, "full_tensor")
    assert part is not None
    local = tensor.detach()
    local = DTensor.full_tensor(local, **options) if isinstance(local, DTensor) else local
    whole = _put_together(runtime, param, part.axis, local.as_subclass(Tensor))
    return _Whole.apply(tensor, whole, part) if torch.is_grad_enabled() and tensor.requires_grad else whole


def cut_like(whole: Tensor, tensor: Tensor, part: PartOf | None) -> Tensor:
    """This rank's part of ``whole``, along the axis that ``tensor``, which is such a part, is cut over."""
    runtime, param = _cut_of(tensor, part, "shard_like")
    coord = runtime.recipe.grid.coord(runtime.world.rank)
    local = torch.empty(local_shape(param, coord), dtype=whole.dtype, device=whole.device)
    for piece in extents(param, coord):
        local[piece.local_index] = whole[piece.full_index]
    return local
