"""The gradient norm of the full model: each element counted once over all ranks, whatever the mesh, ties or replicas.

It is computed in two halves around an all-reduce, so that it travels with what a step exchanges anyway:
:meth:`GradientNorm.entry` is this rank's part, :meth:`GradientNorm.finish` the norm from the sum of all ranks' parts.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from shardwise.parallel import Runtime, norm_power_sum

__all__ = ["GradientNorm"]


class GradientNorm:
    """The p-norm of all gradients of a model, over all ranks.

    Args:
        runtime: of the model.
        norm_type: p, above 0; ``inf`` for the largest element.
        whole_after: parameters whose gradients are final only after the exchange, and then whole on every rank; they
            are counted by :meth:`finish`.
    """

    def __init__(self, runtime: Runtime, norm_type: float = 2.0, *, whole_after: Collection[str] = ()):
        self.runtime, self.norm_type, self.whole_after = runtime, norm_type, whole_after

    def entry(self) -> Tensor:
        """This rank's part, from the pieces of which it is the first owner: a sum of powers, or for p = inf the largest
        element, in this rank's own slot, because exchanges add up."""
        runtime = self.runtime
        grads = ((name, grad) for name, grad in runtime.gradients().items() if name not in self.whole_after)
        own = norm_power_sum((piece for name, grad in grads for piece in runtime.owned(name, grad)), self.norm_type)
        if not math.isinf(self.norm_type):
            return own
        return runtime.world.agreement.slots(own)

    def finish(self, summed: Tensor) -> Tensor:
        """The norm, from the sum of all ranks' entries: 0-dim, float64, on the CPU, equal on every rank."""
        found = self.runtime.gradients() if self.whole_after else {}
        grads = (grad for name, grad in found.items() if name in self.whole_after)
        whole = norm_power_sum(grads, self.norm_type).cpu()
        if math.isinf(self.norm_type):
            return torch.maximum(summed.max(), whole)
        return (summed + whole) ** (1.0 / self.norm_type)
