"""Tells a sum from a mean: how a loss grows when it is computed on one, two and three copies of a micro-batch.

A sum over samples gives f, 2f, 3f; a mean f, f, f; a sum with a mean (or a penalty) added to it lies between, on a
straight line that does not start at 0. What lies on no line (contrastive losses, whose terms depend on the other
samples) is none of these.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.model.pytrees import leaves_of, map_leaves, tensors_within

__all__ = ["Copies", "Growth", "growths_of"]

_ROUNDING = {8: 1e-9, 4: 3e-4}  # bytes per number -> a mean added to a sum shows above this share of it
_OF_FORWARD = 1e-2  # the same where forward ran again: other batch sizes use other kernels
_SQUARE = 1e-3  # tolerance around 4 times and 9 times
_SAME = 0.1  # tolerance between values of a mean that were computed with different random numbers
_MOST_BYTES = 256 << 20  # of three copies in float64; above it, only two samples are copied, in their own dtype


class Growth(NamedTuple):
    """A loss (or another entry) computed on one, two and three copies of a micro-batch.

    Attributes:
        once, twice, thrice: its values on one, two and three copies.
        noise: the relative difference when it is computed again on one copy; above 0 where random numbers are in it.
        rounding: relative differences up to this may be rounding, and prove nothing.
    """

    once: float
    twice: float
    thrice: float
    noise: float
    rounding: float

    @property
    def tells(self) -> bool:
        """Whether the values show anything; False for 0 and for values that are not finite."""
        return self.once != 0.0 and all(math.isfinite(value) for value in self)

    @property
    def rest(self) -> float:
        """The share of the value that does not grow with the copies: 0 for a sum, 1 for a mean."""
        return (2 * self.once - self.twice) / self.once

    @property
    def is_square(self) -> bool:
        """Whether it grows with the square of the copies: four times as large on two, nine times on three."""
        return abs(self.twice / self.once - 4) < _SQUARE and abs(self.thrice / self.once - 9) < _SQUARE

    @property
    def kind(self) -> str:
        """``"sum"``, ``"mean"``, ``"part"`` (a sum and something that does not grow), or ``"other"``."""
        limit = max(self.rounding, 6 * self.noise)
        bend = abs(self.thrice - 2 * self.twice + self.once) / abs(self.once)
        change = max(abs(self.twice / self.once - 1), abs(self.thrice / self.once - 1))
        if change <= (max(limit, _SAME) if self.noise else limit):
            return "mean"
        if bend > limit:
            return "other"
        return "part" if abs(self.rest) > max(limit, 10 * bend) else "sum"


def growths_of(runs: Sequence[Mapping[str, Tensor]], *, of_forward: bool) -> dict[str, Growth]:
    """The :class:`Growth` of each entry that all four runs have: on one copy, one copy again, two and three copies."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    found = {}
    for name in names:
        once, again, twice, thrice = (float(run[name].detach()) for run in runs)
        rounding = _OF_FORWARD if of_forward else _ROUNDING.get(runs[0][name].dtype.itemsize, _OF_FORWARD)
        found[name] = Growth(once, twice, thrice, abs(again / once - 1) if once else 0.0, rounding)
    return found


class Copies:
    """A micro-batch and the model's output for it, repeated along the batch dim: each tensor with a row per sample is.

    Raises:
        ValueError: the micro-batch has no tensor with a row for each sample.
    """

    def __init__(self, batch: Mapping[str, Any], output: Any):
        sizes = Counter(x.shape[0] for x in batch.values() if isinstance(x, Tensor) and x.dim())
        if not sizes:
            raise ValueError("no tensor in it has a row for each sample")
        self.size = sizes.most_common(1)[0][0]
        self._given, self._output = dict(batch), output
        tensors = [x for x in (*batch.values(), *leaves_of(output)) if isinstance(x, Tensor)]
        self._is_small = sum(3 * 8 * x.numel() for x in tensors) <= _MOST_BYTES

    @property
    def is_of_samples(self) -> bool:
        """Whether the copies are a valid micro-batch for the model: the first dim of every tensor is the number of
        samples, or 1 (shared by all samples). Another one, such as the edges of a graph, would have to point to the
        copies."""
        return all(x.shape[0] in (self.size, 1) for x in self._given.values() if isinstance(x, Tensor) and x.dim())

    @property
    def is_whole(self) -> bool:
        """Whether every tensor of the output has a row per sample, so that its copies are the output for the copied
        batch."""
        return self._holds(lambda x: x.dim() > 0 and x.shape[0] == self.size)

    @property
    def is_rows_and_numbers(self) -> bool:
        """The same, except that 0-dim tensors are allowed: a loss, or a part of one, that the forward computed."""
        return self._holds(lambda x: x.dim() == 0 or x.shape[0] == self.size)

    def _holds(self, fits: Any) -> bool:
        tensors = [leaf for leaf in leaves_of(self._output) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(map(fits, tensors)) and tensors_within(self._output) == ([], True)

    def batch(self, num: int) -> dict[str, Any]:
        """``num`` copies of the micro-batch, for the forward."""
        return self._repeated(self._given, num)

    def for_loss(self, num: int, *, exact: bool, computed: Any = None) -> tuple[Any, dict[str, Any]]:
        """``num`` copies of the output and of the micro-batch, for the loss.

        Args:
            exact: convert to float64, if they are small.
            computed: what the model returned for the copied batch. Only its tensors without a row per sample are used;
                the others are copies of the first output.
        """
        output = self._repeated(self._output, num)
        if computed is not None:
            output = self._mixed(output, computed, num)
        if not (exact and self._is_small):
            return output, self.batch(num)
        return _as_float64(output), _as_float64(self.batch(num))

    def _mixed(self, rows: Any, computed: Any, num: int) -> Any:
        old, new = leaves_of(rows), leaves_of(computed)
        if len(old) != len(new):
            return computed
        is_row = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == num * self._num_rows for x in old]
        values = iter([a if keep else b for a, b, keep in zip(old, new, is_row, strict=True)])
        return map_leaves(lambda _: next(values), rows)

    @property
    def _num_rows(self) -> int:
        return self.size if self._is_small else min(self.size, 2)

    def _repeated(self, value: Any, num: int) -> Any:
        def copies(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != self.size:
                return x
            return x[: self._num_rows].repeat(num, *[1] * (x.dim() - 1))

        return map_leaves(copies, value)


def _as_float64(value: Any) -> Any:
    return map_leaves(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, value)
