"""Puts pairs in the place of weights."""

import torch
from torch import nn
from torch.nn import functional

HIGH, LOW = "weight_high", "weight_low"


class Paired(nn.Linear):
    """A linear layer whose weight is two parameters."""

    def forward(self, x):
        weight = self.weight_high.to(x.dtype) + self.weight_low.to(x.dtype)
        return functional.linear(x, weight, self.bias)


def halves(values):
    """Two tensors of float16 whose sum is close to ``values``."""
    high = values.half()
    return high, (values - high.to(values.dtype)).half()


def prepare(module, world, device, *, pair):
    for layer in [*module.modules()] if pair else ():
        if type(layer) is nn.Linear:
            weight = layer.weight
            del layer._parameters["weight"]
            with torch.no_grad():
                for name, half in zip((HIGH, LOW), halves(weight), strict=True):
                    setattr(layer, name, nn.Parameter(half, requires_grad=False))
            layer.__class__ = Paired
    return module
