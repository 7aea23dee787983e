"""What ranks along ``tp`` exchange in a forward and in its backward, as autograd functions: a sum, a gather, or nothing in one
direction, and its counterpart in the other. (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3) Backwards are made of
these functions too, so that gradients can be differentiated again. ``sides`` says of which group, what the gradient is to be that one gets, and what
those are that it gives: whole, the same on every rank, or parts of a sum over them.
"""

from typing import Any

import torch
from torch import Tensor

from shardwise._torch.collectives import gather_over, sum_over


class SumGradient(torch.autograd.Function):
    """Identity, whose gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group, ctx.sides = group, (group, "part", "whole")
        return x.detach()  # not a view, which a model could not change in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return SumParts.apply(grad, ctx.group), None


class SumParts(torch.autograd.Function):
    """The sum over the ranks of a group, whose gradient is as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group, ctx.sides = group, (group, "whole", "part")
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return SumGradient.apply(grad, ctx.group) if torch.is_grad_enabled() else grad, None


class Gather(torch.autograd.Function):
    """The parts of all ranks side by side along ``dim``. ``has_part``: each rank has a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int, dim: int, has_part: bool) -> Tensor:
        ctx.group, ctx.size, ctx.rank, ctx.dim, ctx.has_part = group, size, rank, dim, has_part
        ctx.sides = group, "part" if has_part else "whole", "part"
        return _gathered(x, group, size, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad = SumParts.apply(grad, ctx.group) if ctx.has_part else grad
        if torch.is_grad_enabled():
            part = Scatter.apply(grad, ctx.group, ctx.size, ctx.rank, ctx.dim)
        else:  # without a copy
            width = grad.shape[ctx.dim] // ctx.size
            part = grad.narrow(ctx.dim, ctx.rank * width, width)
        return part, None, None, None, None, None


class Scatter(torch.autograd.Function):
    """This rank's part of a tensor that all have, one of ``size`` even ones along ``dim``; the gradients of the parts are
    gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int, dim: int) -> Tensor:
        ctx.group, ctx.size, ctx.rank, ctx.dim = group, size, rank, dim
        ctx.sides = group, "part", "whole"
        width = x.shape[dim] // size
        return x.narrow(dim, rank * width, width).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return Gather.apply(grad, ctx.group, ctx.size, ctx.rank, ctx.dim, False), None, None, None, None


def _gathered(x: Tensor, group: str, size: int, dim: int) -> Tensor:
    return gather_over(x.movedim(dim, 0), group, size).movedim(0, dim).detach()  # not a view: see SumGradient
