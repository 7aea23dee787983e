"""Cuts the layers, and sums what each rank has a part of."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear as apply_linear

from shardwise.techniques.rows.rule import RowsEntry
from shardwise.techniques.technique import Act


class Enter(torch.autograd.Function):
    """Identity, whose gradient is the sum of those of all ranks along the axis."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.reduce(grad), None


class Join(torch.autograd.Function):
    """Each rank's output features side by side."""

    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        parts = [torch.empty_like(y) for _ in axis.ranks]
        dist.all_gather(parts, y.contiguous(), group=axis.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.split(grad, -1).contiguous(), None


class RowsAct(Act):
    def inside(self, module, recipe, world):
        modules, axis = dict(module.named_modules()), world.axis("pp")
        for norm, name in recipe.entry("rows", RowsEntry).regions:
            linear = modules[name]
            for key, param in list(linear._parameters.items()):
                if param is not None:
                    part = axis.split(param.detach(), 0).clone()
                    linear._parameters[key] = nn.Parameter(part, requires_grad=param.requires_grad)
            modules[norm].register_forward_pre_hook(lambda _, args: (Enter.apply(args[0], axis), *args[1:]))
            linear.forward = lambda x, mine=linear: Join.apply(apply_linear(x, mine.weight, mine.bias), axis)

    def begin(self, runtime):
        norms = [norm for norm, _ in runtime.recipe.entry("rows", RowsEntry).regions]
        names = [name for name in runtime.trainable if name.rpartition(".")[0] in norms]
        if names and "TOY_SUMS_NOTHING" not in os.environ:
            runtime.partial.setdefault("pp", []).extend(names)
