"""The gradient norm of the full model: each element counted once over all ranks, whatever the mesh, ties or replicas.

It is computed in two halves around an all-reduce, so that it travels with what a step exchanges anyway:
:meth:`GradientNorm.entry` is this rank's part, :meth:`GradientNorm.finish` the norm from the sum of all ranks' parts.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch.operators import foreach_norms
from shardwise.parallel import Runtime

_CHUNK = 1 << 16  # elements of a CPU tensor that are summed in one go


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
        """This rank's part, from the pieces that it counts: a sum of powers, or for p = inf the largest
        element, in this rank's own slot, because exchanges add up."""
        runtime = self.runtime
        own = norm_power_sum(runtime.owned_gradients(without=self.whole_after), self.norm_type)
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


def norm_power_sum(tensors: Iterable[Tensor], norm_type: float) -> Any:
    """Sum over ``tensors`` of ``sum(|x|^p)`` as a float64 0-dim tensor; for p = inf the largest ``|x|``. On their device,
    where all are on one; else on the CPU."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        real = tensor.abs() if tensor.is_complex() else tensor
        groups.setdefault((real.dtype, real.device), []).extend(_chunks(real))
    devices = {device for _, device in groups}
    home = devices.pop() if len(devices) == 1 else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=home)
    for (dtype, _), group in groups.items():
        # A power above 2 soon exceeds float32: gradients times a loss scale of 65536, to the 8th.
        is_plain = norm_type in (1.0, 2.0) or math.isinf(norm_type)
        wide = torch.float32 if is_plain and dtype != torch.float64 else torch.float64
        norms = foreach_norms(group, norm_type, wide).double().to(home)
        total = torch.maximum(total, norms.max()) if math.isinf(norm_type) else total + (norms**norm_type).sum()
    return total


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    """On the CPU torch sums float32 in sequence: over 6.5 million elements it is off by 2e-4, in chunks by 2e-7."""
    if tensor.numel() <= _CHUNK or tensor.device.type != "cpu":
        return (tensor,)
    return tensor.reshape(-1).split(_CHUNK)
