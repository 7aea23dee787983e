"""Cuts the layers, and exchanges samples and rows around them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear as apply_linear

from shardwise.techniques.spread.rule import SpreadEntry
from shardwise.techniques.technique import Act


def gathered(tensor, axis, dim):
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in axis.ranks]
    dist.all_gather(parts, tensor.contiguous(), group=axis.group)
    return torch.cat(parts, dim)


class AllSamples(torch.autograd.Function):
    """The samples of all ranks along the axis; backward sums what each rank's rows say of this rank's samples."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return gathered(x, axis, 0)

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.split(ctx.axis.reduce(grad), 0).contiguous(), None


class OwnSamples(torch.autograd.Function):
    """All rows for this rank's samples, from some rows for all of them."""

    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        return axis.split(gathered(y, axis, -1), 0).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.split(gathered(grad, ctx.axis, 0), -1).contiguous(), None


class SpreadAct(Act):
    def inside(self, module, recipe, world):
        modules, axis = dict(module.named_modules()), world.axis("ep")
        for name in recipe.entry("spread", SpreadEntry).layers:
            linear = modules[name]
            for key, param in list(linear._parameters.items()):
                if param is not None:
                    part = axis.split(param.detach(), 0).clone()
                    linear._parameters[key] = nn.Parameter(part, requires_grad=param.requires_grad)
            linear.forward = lambda x, mine=linear: OwnSamples.apply(
                apply_linear(AllSamples.apply(x, axis), mine.weight, mine.bias), axis
            )
