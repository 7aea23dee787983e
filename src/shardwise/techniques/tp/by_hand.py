"""Layers that are cut over ranks by hand: in a loss, or in a model that :func:`~shardwise.parallelize` does not get.

``axis`` is ``world.axis("tp")``, or any other: its ranks work on the same data, and all of them make the same calls. With one
rank nothing is exchanged.
"""

from torch import Tensor
from torch.nn import functional

from shardwise._torch.collectives import group_name
from shardwise.errors import UnsupportedError, UsageError
from shardwise.model.leaves import is_trial_running
from shardwise.techniques.tp.exchanges import Gather, Scatter, SumGradient, SumParts
from shardwise.world.axis import Axis


def tp_copy(x: Tensor, axis: Axis) -> Tensor:
    """``x``, which every rank has whole and uses for its part: the gradient is summed over the ranks.

    Args:
        x: equal on every rank of the axis.
        axis: ``world.axis("tp")``.

    Raises:
        UnsupportedError: within a model that is given to ``parallelize`` with ``tp``, as is each of these functions.
    """
    group = _group(axis, "tp_copy")
    return x if group is None else SumGradient.apply(x, group)


def tp_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of ``x`` over the ranks, each of which has a part of it; the gradient is that of the sum.

    Args:
        x: this rank's summand.
        axis: ``world.axis("tp")``.
    """
    group = _group(axis, "tp_reduce")
    return x if group is None else SumParts.apply(x, group)


def tp_scatter(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """This rank's even part of ``x`` along ``dim``; the gradients of the parts are gathered, so that every rank has that of
    all of ``x``. Of a parameter that every rank keeps whole, the part to compute with.

    Args:
        x: equal on every rank of the axis.
        axis: ``world.axis("tp")``.
        dim: the dim that is cut.

    Raises:
        UsageError: the ranks do not divide the dim.
    """
    group = _group(axis, "tp_scatter")
    if group is None:
        return x
    if x.shape[dim] % axis.size:
        raise UsageError(
            f"tp_scatter of a tensor of shape {tuple(x.shape)} along dim {dim}",
            why=f"the {axis.size} ranks along {axis.name} do not divide {x.shape[dim]}",
            fix="fill it up to a multiple, or use an axis of fewer ranks",
        )
    return Scatter.apply(x, group, axis.size, axis.rank, dim)


def tp_gather(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """The parts of all ranks, of one shape, side by side along ``dim``; the gradient is this rank's part of it.

    Args:
        x: this rank's part.
        axis: ``world.axis("tp")``.
        dim: the dim along which parts are joined.
    """
    group = _group(axis, "tp_gather")
    return x if group is None else Gather.apply(x, group, axis.size, axis.rank, dim, False)


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axis: Axis, gather_output: bool = False
) -> Tensor:
    """A linear layer of which each rank computes some of the outputs [..., out / ranks].

    Args:
        x: inputs [..., in], the same on every rank; their gradient is summed.
        weight: this rank's rows [out / ranks, in]: ``axis.split(whole)``, or ``tp_scatter(whole, axis, 0)``.
        bias: this rank's part [out / ranks]; None: there is none.
        axis: the ranks.
        gather_output: return all outputs [..., out].
    """
    y = functional.linear(tp_copy(x, axis), weight, bias)
    return tp_gather(y, axis) if gather_output else y


def row_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axis: Axis, input_is_parallel: bool = True
) -> Tensor:
    """A linear layer of which each rank has some of the inputs; the outputs [..., out] are summed over the ranks.

    Args:
        x: this rank's part of the inputs [..., in / ranks]; all of them where ``input_is_parallel`` is False.
        weight: this rank's columns [out, in / ranks]: ``axis.split(whole, 1)``, or ``tp_scatter(whole, axis)``.
        bias: [out], whole on every rank: it is added once, to the sum; None: there is none.
        axis: the ranks.
        input_is_parallel: whether ``x`` is a part.
    """
    x = x if input_is_parallel else tp_scatter(x, axis)
    y = tp_reduce(functional.linear(x, weight), axis)
    return y if bias is None else y + bias


def parallel_embedding(ids: Tensor, weight: Tensor, *, axis: Axis) -> Tensor:
    """Rows of a table [tokens, width] of which each rank has some of the columns: all columns of ``ids`` [...], [..., width].

    Args:
        ids: integers [...], the same on every rank.
        weight: this rank's columns [tokens, width / ranks]: ``axis.split(whole, 1)``, or ``tp_scatter(whole, axis)``.
        axis: the ranks.
    """
    return tp_gather(functional.embedding(ids, weight), axis)


def _group(axis: Axis, name: str) -> str | None:
    """The name of the process group of an axis; None: it has one rank."""
    if axis.size == 1:
        return None
    if is_trial_running():
        raise UnsupportedError(
            f"{name} within a model that is given to parallelize with tp={axis.size}",
            why="one rank runs the model by itself to find what can be cut, and the others would not make this call",
            fix="write nn.Linear and nn.Embedding there, which parallelize cuts; or leave parallelize out",
        )
    return group_name(axis.group)
