"""Gradients of 0-dim parameters, which FSDP2 does not shard: summed over the ranks in an exchange before the step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise.techniques.data.gradients import add_to_gradient
from shardwise.techniques.data.penalties import PenaltyGradients, add_to_part, tolerance

__all__ = ["ScalarGradients"]


class ScalarGradients:
    """Packs the gradients of ``params`` for an exchange, with what ``penalties`` kept apart, and unpacks the sums.

    Args:
        params: 0-dim parameters, the same on every rank.
        penalties: their gradients that were kept apart, by number.
        num_ranks: how many ranks count.
        counts: whether this one does; of ranks with the same data only the first.
    """

    def __init__(self, params: Sequence[nn.Parameter], penalties: PenaltyGradients, num_ranks: int, *, counts: bool):
        self._params, self._penalties, self._num_ranks, self._counts = params, penalties, num_ranks, float(counts)

    def entries(self) -> dict[str, Tensor]:
        """Entries for the exchange; empty without such parameters. ``whole``: this rank's gradients as float64 [n, 2],
        real and imaginary part. ``apart``, float64 [n, 4]: whether a part was kept, its real and imaginary part, its
        squared absolute value."""
        if not self._params:
            return {}
        whole = torch.stack([_wire(param.grad) for param in self._params])
        return {"whole": self._counts * whole, "apart": self._counts * self._wire_of_parts()}

    def set(self, summed: Mapping[str, Tensor], used: Sequence[bool]) -> None:
        """Replaces this rank's gradients by the sums; None where no rank used a parameter."""
        for param, value, is_used in zip(self._params, summed.get("whole", ()), used, strict=True):
            param.grad = _unwired(value, param) if is_used else None
        for param, row in zip(self._params, summed.get("apart", ()), strict=True):
            self._count_once(param, row)

    def _wire_of_parts(self) -> Tensor:
        parts: dict[int, Tensor] = {}
        for kept in self._penalties.take().values():
            for i, part in kept.items():
                add_to_part(parts, i, part)
        rows = torch.zeros(len(self._params), 4, dtype=torch.float64)
        for i, part in parts.items():
            value = complex(part.item())
            rows[i] = torch.tensor([1.0, value.real, value.imag, abs(value) ** 2], dtype=torch.float64)
        return rows

    def _count_once(self, param: nn.Parameter, row: Tensor) -> None:
        """Adds what the ranks kept apart: once if it is the same on all of them, else the sum."""
        count, real, imag, squares = row.tolist()
        if not count:
            return
        total = complex(real, imag)
        spread = squares / self._num_ranks - abs(total / self._num_ranks) ** 2  # the variance over the ranks
        is_same = count == self._num_ranks and spread <= tolerance(param.dtype) ** 2 * squares / self._num_ranks
        value = total / self._num_ranks if is_same else total
        add_to_gradient(param, _unwired(torch.tensor([value.real, value.imag], dtype=torch.float64), param))


def _wire(grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros(2, dtype=torch.float64)
    return torch.view_as_real(local_tensor(grad).detach().to(torch.complex128).cpu())


def _unwired(value: Tensor, param: nn.Parameter) -> Tensor:
    both = torch.complex(value[0], value[1])
    return (both if param.is_complex() else both.real).to(param.device, param.dtype)
