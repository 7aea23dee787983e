"""The whole of a part, put together from those of all ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.model.tensors import bytes_of
from shardwise.parallel.part_errors import PartOf
from shardwise.parallel.runtime import Runtime
from shardwise.recipe import Param, extents, local_shape


class Whole(torch.autograd.Function):
    """The whole of a part, to be read: a gradient of it would count as often as there are ranks that compute it."""

    @staticmethod
    def forward(ctx: Any, _tensor: Tensor, whole: Tensor, part: PartOf) -> Tensor:
        ctx.part = part
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


def put_together(runtime: Runtime, param: Param, axis_name: str, local: Tensor) -> Tensor:
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
