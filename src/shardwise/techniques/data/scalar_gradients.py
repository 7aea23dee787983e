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
        real and imaginary part. ``apart``, float64 [n, 6]: whether a part was kept, its real and imaginary part, its
        squared absolute value, and the number of the first parameter whose gradient came with it, with its square."""
        if not self._params:
            return {}
        whole = torch.stack([_wire(param) for param in self._params])
        return {"whole": self._counts * whole, "apart": self._counts * self._wire_of_parts()}

    def set(self, summed: Mapping[str, Tensor], used: Sequence[bool]) -> None:
        """Replaces this rank's gradients by the sums; None where no rank used a parameter."""
        for param, value, is_used in zip(self._params, summed.get("whole", ()), used, strict=True):
            param.grad = _unwired(value, param) if is_used else None
        rows = [row.tolist() for row in summed.get("apart", ())]
        # Equal by chance on all ranks, as a bias's gradient may be, is not the same term: those of one backward are
        # judged together.
        groups = [self._group(row) for row in rows]
        differ = {
            group
            for param, row, group in zip(self._params, rows, groups, strict=True)
            if row[0] and not self._is_same(param, row)
        }
        for param, row, group in zip(self._params, rows, groups, strict=True):
            if row[0]:
                total, divisor = complex(row[1], row[2]), self._num_ranks if group not in differ else 1
                value = torch.tensor([total.real, total.imag], dtype=torch.float64) / divisor
                add_to_gradient(param, _unwired(value, param))

    def _wire_of_parts(self) -> Tensor:
        parts: dict[int, Tensor] = {}
        first = list(range(len(self._params)))
        for kept in self._penalties.take().values():
            for i, part in kept.items():
                add_to_part(parts, i, part)
            together = {first[i] for i in kept}
            first = [min(together) if found in together else found for found in first]
        rows = torch.zeros(len(self._params), 6, dtype=torch.float64)
        for i, part in parts.items():
            value, group = complex(part.item()), float(first[i])
            rows[i] = torch.tensor([1.0, value.real, value.imag, abs(value) ** 2, group, group**2], dtype=torch.float64)
        return rows

    def _group(self, row: Sequence[float]) -> int:
        """The number that parameters have in common whose gradients came in one backward, on all ranks; -1: ranks differ."""
        count, *_, total, squares = row
        return int(total / count) if count and count * squares == total**2 else -1

    def _is_same(self, param: nn.Parameter, row: Sequence[float]) -> bool:
        """Whether what the ranks kept apart is the same on all of them, so that it counts once."""
        count, real, imag, squares, *_ = row
        mean = abs(complex(real, imag) / self._num_ranks) ** 2
        spread = squares / self._num_ranks - mean  # the variance over the ranks
        return (
            count == self._num_ranks
            and self._group(row) >= 0
            and spread <= tolerance(param.dtype) ** 2 * squares / self._num_ranks
        )


def _wire(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        return torch.zeros(2, dtype=torch.float64, device=param.device)
    return torch.view_as_real(local_tensor(param.grad).detach().to(torch.complex128))


def _unwired(value: Tensor, param: nn.Parameter) -> Tensor:
    both = torch.complex(value[0], value[1])
    return (both if param.is_complex() else both.real).to(param.device, param.dtype)
