"""How a model is run on a batch: the one call that training, evaluation and the check of the loss share."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.parallel import Runtime
from shardwise.step.loss import Batch, Loss, as_sums
from shardwise.step.step_state import StepState

__all__ = ["Forward", "run_on", "sums_on"]

Forward = Callable[[nn.Module, Batch, StepState], Any]
"""How the model is called: ``forward(model, batch, state)`` -> output, as :func:`~shardwise.step.loss.forward_of` makes it."""


def run_on(runtime: Runtime, forward: Forward, batch: Batch, state: StepState) -> Any:
    """The model's output for a batch. What is to be done with the batch of every run, whatever the run is for, belongs here."""
    return forward(runtime.module, batch, state)


def sums_on(
    runtime: Runtime, forward: Forward, loss: Loss | None, batch: Batch, state: StepState
) -> tuple[Any, dict[str, Tensor]]:
    """:func:`run_on`, and the sums of the loss: those that the forward has returned where ``loss`` is None."""
    output = run_on(runtime, forward, batch, state)
    return output, as_sums(output if loss is None else loss(output, batch))
