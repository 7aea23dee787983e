"""What a training loop, or a loss, of the user's own does with sequences that are cut over ranks."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from shardwise.config.keywords import public_call
from shardwise.parallel.runtime import runtime_of

T = TypeVar("T", Tensor, Mapping[str, Any])


@public_call()
def cut_sequence(model: nn.Module, value: T, dim: int = 1) -> T:
    """This rank's positions of what a loss compares with the output of a model, in a loop of your own (``sw.window``, ``sw.accumulate``): a
    :class:`TrainStep` does that itself. Without ``cp``, and where the output is of all positions, ``value`` itself.

    Args:
        model: from ``parallelize``.
        value: a tensor with all positions along ``dim``, such as labels ``[batch, positions]``; or a micro-batch, of which each tensor with
            the samples and positions of the model's last forward is cut.
        dim: of the positions.

    Raises:
        UsageError: a micro-batch before the model's first forward.

    Example:
        >>> for batch in window:  # doctest: +SKIP
        ...     labels = sw.cut_sequence(model, batch["labels"])
        ...     loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), labels.flatten(), reduction="sum")
    """
    sequence = runtime_of(model).sequence
    return value if sequence is None else sequence.cut(value, dim)  # type: ignore[return-value]


@public_call()
def join_sequence(model: nn.Module, x: Tensor, dim: int = 1) -> Tensor:
    """All positions, in order, of what each rank along ``cp`` has of its own: of the output of a model's last forward. Differentiable: where
    every rank computes the same loss of it, that loss counts once for each rank, so divide it by ``world.axis("cp").size``. Without
    ``cp``, and where the output is of all positions, ``x`` itself. All ranks along ``cp`` must call it.

    Args:
        model: from ``parallelize``.
        x: this rank's positions, along ``dim``.
        dim: of the positions.

    Raises:
        UsageError: ``x`` has not as many positions as this rank has of the last forward.
    """
    sequence = runtime_of(model).sequence
    return x if sequence is None else sequence.join(x, dim)
