"""The norm of the whole gradient: each element counted once over all ranks, whatever the mesh, ties or replicas.

Two halves around an exchange, so that a step's norm travels with what it exchanges anyway: :meth:`GradientNorm.entry` is
what this rank brings, :meth:`GradientNorm.finish` the norm from the sum of all ranks' entries.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from shardwise.parallel import Runtime, norm_power_sum

__all__ = ["GradientNorm"]


class GradientNorm:
    """The p-norm over a model's gradients.

    Args:
        runtime: of the model.
        norm_type: p, above 0; ``inf`` for the largest element.
        whole_after: parameters whose gradients are final only after the exchange, and then whole on every rank; they
            are counted by :meth:`finish`.
    """

    def __init__(self, runtime: Runtime, norm_type: float = 2.0, *, whole_after: Collection[str] = ()):
        self.runtime, self.norm_type, self.whole_after = runtime, norm_type, whole_after

    def entry(self) -> Tensor:
        """This rank's part, from the pieces of which it is the first owner: a power sum, or for p = inf the largest
        element, in a slot of its own, because exchanges are sums."""
        runtime = self.runtime
        grads = ((name, grad) for name, grad in runtime.gradients().items() if name not in self.whole_after)
        own = norm_power_sum((piece for name, grad in grads for piece in runtime.owned(name, grad)), self.norm_type)
        if not math.isinf(self.norm_type):
            return own
        return runtime.world.agreement.slots(float(own))

    def finish(self, summed: Tensor) -> Tensor:
        """The norm, from the sum of all ranks' entries: 0-dim, float64, on the CPU, equal on every rank."""
        grads = (grad for name, grad in self.runtime.gradients().items() if name in self.whole_after)
        whole = norm_power_sum(grads, self.norm_type)
        if math.isinf(self.norm_type):
            return torch.maximum(summed.max(), whole)
        return (summed + whole) ** (1.0 / self.norm_type)
