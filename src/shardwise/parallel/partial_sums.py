"""Sums over an axis the gradients of which each rank along it has a part, at the end of a window."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise.model.tensors import like_parameter
from shardwise.parallel.runtime import Runtime
from shardwise.recipe import Slice, extents
from shardwise.world.axis import Axis


def sum_partial(runtime: Runtime, place: str) -> None:
    """Sums the gradients of :attr:`Runtime.partial` over their axes, once; ``.grad`` must hold only this window's
    gradients. ``place`` is for messages."""
    for name, names in runtime.partial.items():
        axis = runtime.world.axis(name)
        packed = [
            _PartialSum(runtime.parameters[each], slots) for each in names if (slots := _slots(runtime, each, axis))
        ]
        for dtype in dict.fromkeys(each.dtype for each in packed) if axis.size > 1 else ():
            of_dtype = [each for each in packed if each.dtype == dtype]
            flat = torch.cat([part for each in of_dtype for part in each.parts()])
            runtime.world.agreement.carry_out(
                functools.partial(_sum_all, [flat], axis.group), f"{place}, summing gradients over {name}"
            )
            for each, summed in zip(of_dtype, flat.split([each.numel for each in of_dtype]), strict=True):
                each.put(summed)


def add_late(runtime: Runtime, used: Sequence[float], place: str) -> None:
    """Sums the gradients that came after the others of a window were sent; see ``Engine.late``."""
    before = {name: param.grad for name, param in runtime.parameters.items()}
    for param in runtime.parameters.values():
        param.grad = None
    runtime.engine.add_late(used, place)
    sum_partial(runtime, place)
    for name, grad in before.items():
        param = runtime.parameters[name]
        if grad is not None:
            param.grad = grad if param.grad is None else grad + param.grad


def _slots(runtime: Runtime, name: str, axis: Axis) -> list[tuple[int, Slice | None]]:
    """What of parameter ``name`` is summed over ``axis``: numbers of elements, equal on every rank of it, each with the
    piece that is this rank's; None: it is not. Pieces that one rank of the axis holds alone are not summed."""
    coords = [runtime.recipe.grid.coord(rank) for rank in axis.ranks]
    held = [{piece.box: piece for piece in extents(runtime.recipe.params[name], coord)} for coord in coords]
    boxes = sorted({box for pieces in held for box in pieces if sum(box in other for other in held) > 1})
    return [(math.prod(box.sizes), held[axis.rank].get(box)) for box in boxes]


class _PartialSum:
    """The gradient of one parameter, of which each rank along an axis has a part.

    Args:
        param: the parameter; its gradient may be None.
        slots: see :func:`_slots`.
    """

    def __init__(self, param: nn.Parameter, slots: list[tuple[int, Slice | None]]):
        self._param, self._slots = param, slots
        local = local_tensor(param)
        self.dtype, self._shape, self._device = local.dtype, local.shape, local.device
        self.numel = sum(numel for numel, _ in slots)

    def parts(self) -> list[Tensor]:
        """One flat tensor for each slot: zeros where this rank has nothing."""
        grad = None if self._param.grad is None else local_tensor(self._param.grad)
        empty = functools.partial(torch.zeros, dtype=self.dtype, device=self._device)
        return [
            empty(numel) if piece is None or grad is None else grad[piece.local_index].reshape(-1)
            for numel, piece in self._slots
        ]

    def put(self, summed: Tensor) -> None:
        """Writes the sums into the gradient. One that this rank has not got stays None if it is 0 on all ranks."""
        if self._param.grad is None:
            if not bool(summed.any()):
                return
            zeros = torch.zeros(self._shape, dtype=self.dtype, device=self._device)
            self._param.grad = like_parameter(zeros, self._param)
        grad = local_tensor(self._param.grad)
        for (_, piece), part in zip(self._slots, summed.split([numel for numel, _ in self._slots]), strict=True):
            if piece is not None:
                grad[piece.local_index] = part.view(piece.sizes)


def _sum_all(tensors: list[Tensor], group: Any) -> list[Any]:
    return [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
