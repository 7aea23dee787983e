"""How a loss grows with the number of copies of its micro-batch: a sum, a mean, or something else."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = {8: 1e-9, 4: 3e-4, 2: 1e-2}
"""Bytes per number -> relative differences up to this are rounding, in sums of millions. The last one also where a forward runs on
another number of samples, for which devices have other kernels."""
APART = 10  # two guesses are different ones from so many times the rounding on
UNCHANGED = 1e-3  # of what another label changes: less, and the label is not used


class Growth(NamedTuple):
    """An entry of the loss on one, two and three copies of a micro-batch: a sum gives f, 2f, 3f; a mean f, f, f; a sum with a mean
    (or a penalty) added to it lies between, on a straight line that does not start at 0. What lies on no line (contrastive
    losses, whose terms depend on the other samples) is none of these. ``is_noisy``: random numbers are in it."""

    once: float
    twice: float
    thrice: float
    rounding: float
    is_noisy: bool

    @property
    def rest(self) -> float:
        """The share of the value that does not grow with the copies: 0 for a sum, 1 for a mean."""
        return (2 * self.once - self.twice) / self.once

    @property
    def is_square(self) -> bool:
        """Whether it grows with the square of the copies: four times as large on two, nine times on three."""
        return all(abs(x / self.once - ratio) < UNCHANGED for x, ratio in ((self.twice, 4), (self.thrice, 9)))

    @property
    def kind(self) -> str:
        """``"sum"``, ``"mean"``, ``"part"`` (a sum and something that does not grow), or ``"other"``."""
        if self.is_noisy:
            return "mean" if self.twice / self.once < 1.5 and self.thrice / self.once < 2 else "sum"  # the nearer one
        bend = abs(self.thrice - 2 * self.twice + self.once) / abs(self.once)
        if max(abs(self.twice / self.once - 1), abs(self.thrice / self.once - 1)) <= self.rounding:
            return "mean"
        if bend > self.rounding:
            return "other"
        return "part" if abs(self.rest) > max(self.rounding, APART * bend) else "sum"


def growths_of(runs: Sequence[Mapping[str, Tensor]], *, is_noisy: bool, of_forward: bool = False) -> dict[str, Growth]:
    """How each entry of the loss grows from one copy to two and three; without those that show nothing."""
    found = {}
    for name in (name for name in runs[0] if all(name in run for run in runs)):
        once, twice, thrice = (float(run[name].detach()) for run in runs)
        rounding = ROUNDING[2] if of_forward else ROUNDING.get(runs[0][name].dtype.itemsize, ROUNDING[2])
        if once and all(map(math.isfinite, (once, twice, thrice))):
            found[name] = Growth(once, twice, thrice, rounding, is_noisy)
    return found


def resolution(loss: Tensor) -> float:
    """Relative differences up to this are in the last places of a loss that is computed in another order."""
    return min(max(16 * torch.finfo(loss.dtype).eps, ROUNDING[8]), ROUNDING[2])
