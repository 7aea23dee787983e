"""In which order the forwards and backwards of a window's micro-batches run."""

from collections.abc import Callable
from typing import Protocol


class MicroBatches(Protocol):
    """The micro-batches of a window, by number, as a :class:`~shardwise.step.step.TrainStep` runs them.

    Attributes:
        num: how many there are; equal on every rank.
    """

    num: int

    def run(self, i: int) -> None:
        """Forward and backward of micro-batch ``i``."""

    def forward(self, i: int) -> None:
        """The forward alone. Its graph is kept until :meth:`backward`."""

    def backward(self, i: int) -> None:
        """The backward of a micro-batch whose forward has run."""


Schedule = Callable[[MicroBatches], None]
"""Runs the forward and the backward of each micro-batch once. The calls are the same, in the same order, on all ranks that hold the
same units. A technique sets its own in :meth:`~shardwise.techniques.technique.Act.begin`: ``runtime.schedule``."""


def sequential(work: MicroBatches) -> None:
    """One micro-batch after the other: the graph of one at a time is held."""
    for i in range(work.num):
        work.run(i)
