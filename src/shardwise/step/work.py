"""The micro-batches of a training step's window, each with its forward and its backward."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise._torch.spans import span
from shardwise.data.batch import MicroBatch
from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel.backwards import unchecked
from shardwise.step.window import Window

Sums = tuple[dict[str, Tensor], ShardwiseError | None]


class Work:
    """The micro-batches of one window of a :class:`TrainStep`; see :class:`~shardwise.step.schedule.MicroBatches`.

    Args:
        window: of which they are.
        sums_of: the sums of the loss on a micro-batch, and the error where they have no gradient.
        scaled: the loss, as its backward begins with it.

    Attributes:
        totals: sums of the loss's entries over the micro-batches so far.
        detached: the error for a loss that has no gradient, of the last micro-batch that had one.
    """

    def __init__(self, window: Window, sums_of: Callable[[MicroBatch], Sums], scaled: Callable[[Tensor], Tensor]):
        self._window, self._sums_of, self._scale = window, sums_of, scaled
        self.num = len(window.batches)
        self.totals: dict[str, Tensor] = {}
        self.detached: ShardwiseError | None = None
        self._scaled: dict[int, Tensor] = {}  # of the micro-batches whose backward has not run: what it begins with

    def run(self, i: int) -> None:
        with self._window.part(i, forward=True, backward=True) as batch:
            self._forward(i, batch)
            self._backward(i)

    def forward(self, i: int) -> None:
        with self._window.part(i, forward=True) as batch:
            self._forward(i, batch)

    def backward(self, i: int) -> None:
        with self._window.part(i, backward=True):
            self._backward(i)

    def _forward(self, i: int, batch: MicroBatch) -> None:
        totals = self.totals
        with span("forward of micro-batch", batch.index):
            sums, detached = self._sums_of(batch)
        self.detached = detached or self.detached
        self._scaled[i] = self._scale(sums["loss"] / self._window.num_tokens)
        for name, value in sums.items():
            value = value.detach().double()
            value = torch.zeros_like(value) if batch.padding else value
            totals[name] = totals[name] + value if name in totals else value

    def _backward(self, i: int) -> None:
        if i not in self._scaled:
            raise UsageError(
                f"a schedule that runs the backward of micro-batch {i} before its forward, or twice",
                why="a backward needs the graph of its forward, and its gradients would count double",
                fix="call forward(i) once and then backward(i) once, for each micro-batch of the window",
            )
        with unchecked(), span("backward of micro-batch", self._window.index(i)):
            self._scaled.pop(i).backward()
