"""What a training loop, or a loss, of the user's own does with sequences that are cut over ``cp``."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from shardwise.config.keywords import public_call
from shardwise.errors import UsageError
from shardwise.parallel.runtime import runtime_of
from shardwise.techniques.cp.act import cuts_of
from shardwise.techniques.cp.exchanges import gathered

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
    cuts = cuts_of(runtime_of(model))
    if cuts is None or cuts.is_whole:
        return value
    if isinstance(value, Tensor):
        return cuts.rows_of(value, dim % value.dim())
    if cuts.last is None:
        raise UsageError(
            "cut_sequence of a micro-batch before a forward of the model",
            why="which of its tensors have positions is known by what the model was called with",
            fix='call the model first; or pass one tensor: sw.cut_sequence(model, batch["labels"])',
        )
    return cuts.part_of(value)  # type: ignore[return-value]


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
    cuts = cuts_of(runtime_of(model))
    if cuts is None or cuts.is_whole:
        return x
    num = None if cuts.last is None else cuts.num_rows(cuts.last.length)
    if cuts.last is None or x.shape[dim] != num:
        raise UsageError(
            f"join_sequence of a tensor {tuple(x.shape)} along dim {dim}",
            why="the model was not run on cut sequences yet" if num is None else f"of the last forward this rank has {num} positions",
            fix="pass what the model's last forward with gradients, or of an evaluation, has returned, and its dim of positions",
        )
    return gathered(x, cuts.last, cuts.ranks, dim % x.dim())
