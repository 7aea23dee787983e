"""Whether ranks that hold the same parameters whole have the same gradients of them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise._torch.dtensor import local_tensor
from shardwise.errors import RankError
from shardwise.model import dtype_of
from shardwise.parallel.runtime import Runtime
from shardwise.world.axis import Axis


class Replicas:
    """Compares the gradients of parameters that all ranks along an axis hold whole whose ranks have the same data (``tp``): a
    difference is a part of a gradient for the whole. In the first window of a run and then ever more rarely, in the exchange that is
    made anyway; in every window along the axes of :attr:`Runtime.compared`, but for parts that are summed."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        runtime.num_windows += 1
        is_due = not runtime.num_windows & (runtime.num_windows - 1)
        names = [name for name in runtime.world.layout.shared_axes if is_due or name in runtime.compared]
        axes, params = [runtime.world.axis(name) for name in names], runtime.recipe.params
        self._held = [
            (axis, name)
            for axis in axes
            for name in runtime.trainable
            if name in params
            and all(cut.axis != axis.name for cut in params[name].cuts)
            and (is_due or name not in runtime.partial.get(axis.name, ()))
        ]

    def entries(self) -> dict[str, Tensor]:
        """``replicas``, float64 [n, 2]: of each gradient a sum with other signs on the ranks, 0 where they are equal; and the square of how
        large such a sum is by chance."""
        if not self._held:
            return {}
        marks = [_mark(self._runtime.parameters[name], _weight(axis)) for axis, name in self._held]
        return {"replicas": torch.stack(marks)}

    def apply(self, summed: Mapping[str, Tensor]) -> None:
        found = []
        for (axis, name), (off, squares) in zip(
            self._held, summed["replicas"].tolist() if self._held else [], strict=True
        ):
            copies = self._num_copies(axis, name)
            found.append((abs(off) / copies, (squares / copies / axis.size) ** 0.5))
        least = _NOISE * max((size for _, size in found), default=0.0)
        for (axis, name), (off, size) in zip(self._held, found, strict=True):
            if off > max(size, least) * self._rounding(name):
                raise self._differ(axis, name)
            numel = math.prod(self._runtime.recipe.params[name].shape)
            if off > size * _EXACT * numel**0.5:
                param = self._runtime.parameters[name]
                local = torch.zeros_like(local_tensor(param)) if param.grad is None else local_tensor(param.grad)
                local.copy_(axis.reduce(local, "sum") / axis.size)

    def _num_copies(self, axis: Axis, name: str) -> int:
        """How many sets of the ranks of ``axis`` have the same numbers of a gradient: one by one, they count that often in a sum over
        all ranks."""
        layout = self._runtime.world.layout
        others = math.prod(layout.degree(other) for other in layout.shared_axes if other != axis.name)
        if name in self._runtime.replicated:  # not yet summed over the data ranks
            return others
        pieces = math.prod(layout.degree(cut.axis) for cut in self._runtime.recipe.params[name].cuts)
        return max(1, others * layout.degree("loss") // pieces)

    def _rounding(self, name: str) -> float:
        """Of a gradient, relative: on a device sums may be in another order on each rank, in the dtype that is computed in."""
        param = self._runtime.recipe.params[name]
        return max(torch.finfo(dtype_of(dtype)).eps for dtype in (param.storage, param.compute, param.reduce)) ** 0.5

    def _differ(self, axis: Axis, name: str) -> RankError:
        return RankError(
            f"ranks {', '.join(map(str, axis.ranks))} with other gradients of a parameter that each holds whole",
            why=f"they have the same data, along {axis.name}: code between layers that are cut uses it in a way that the example did not show",
            fix="parallelize(..., example=batch), with one micro-batch as training gives it; or keep the layers around it whole: "
            "tensor_parallel=sw.TensorParallel(plan={...})"
            + (f"; or {other}" if (other := self._runtime.compared.get(axis.name)) else ""),
            name=name,
            ranks=axis.ranks,
        )


_EXACT = 2.0**-48  # of a float64 sum, beside the square root of how many numbers are summed
_NOISE = 1e-2  # of the largest gradient: a smaller one, as that of a key's bias, may be rounding alone
_STEP = 0.7548776662
_AT_ONCE = 1 << 20  # numbers: a gradient as large as a table of tokens would need three times its size in float64


def _weight(axis: Axis) -> float:
    """Of this rank: the weights of the ranks of an axis add up to 0, and the largest is 1."""
    weights = [(i + 1) * _STEP % 1 for i in range(axis.size)]
    weights = [weight - sum(weights) / len(weights) for weight in weights]
    return weights[axis.rank] / max(map(abs, weights))


def _mark(param: Tensor, weight: float) -> Tensor:
    """Of its gradient: :func:`marks_of`, of which the first is times ``weight``."""
    if param.grad is None:
        return torch.zeros(2, dtype=torch.float64, device=local_tensor(param).device)
    found = marks_of(local_tensor(param.grad))
    found[0] *= weight
    return found


def marks_of(tensor: Tensor) -> Tensor:
    """A sum of its numbers with a weight for each place; and the square of how large such a sum is by chance."""
    flat = tensor.detach().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    found = torch.zeros(2, dtype=torch.float64, device=flat.device)
    places = torch.arange(1, min(flat.numel(), _AT_ONCE) + 1, dtype=torch.float64, device=flat.device)
    places.mul_(_STEP).frac_()
    for part in flat.split(_AT_ONCE):
        terms = places[: part.numel()] * part
        found += torch.stack([terms.sum(), terms.square_().sum()])
    return found
