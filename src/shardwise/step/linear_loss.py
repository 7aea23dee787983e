"""Cross entropy of a linear layer's outputs that never holds all of them: logits [T, V] of a vocabulary are the largest
tensor of most language models.

Logits are made for some tokens at a time, and their gradients with them in the forward: as the loss is a sum, the backward
only multiplies by one number. (Liger Kernel, https://arxiv.org/abs/2410.10989, section 3.2.) Where each rank has the rows of
some tokens of the vocabulary, the ranks exchange four numbers for each position, and sum the gradient of the inputs.
(Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise._torch.collectives import group_name, max_over, sum_over
from shardwise.data.batch import IGNORED
from shardwise.errors import ConfigError, UnsupportedError, UsageError
from shardwise.world.axis import Axis


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    axis: Axis | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias``, summed over the valid positions; 0-dim, in float32 or wider. The
    logits [..., V] are never held: what it needs beside its inputs and their gradients is about ``chunk_size * V``
    numbers.

    ``F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum")`` is the same number. Gradients are
    made in the forward (in the backward for float16, whose small numbers need the loss scale).

    Args:
        hidden: inputs of the layer [..., d].
        weight: [V, d]; with ``axis``, this rank's rows of it.
        labels: integers [...], the class of each position; ``ignore_index``: it is not counted.
        bias: [V], or this rank's part; None: there is none.
        ignore_index: the label of positions that are left out.
        label_smoothing: the share of the target that is spread evenly over all classes, as in ``F.cross_entropy``.
        z_loss: factor of ``logsumexp(logits) ** 2``, which keeps logits small (PaLM, https://arxiv.org/abs/2204.02311,
            section 5; there 1e-4).
        chunk_size: how many positions have logits at a time; None: a twelfth of them, and at most 2**26 logits.
        axis: ranks that have the rows of some classes each, as ``torch.chunk`` cuts them, and the same ``hidden`` and
            labels; every one of them must call this. The gradient of ``hidden`` is whole on each.
        vocab_size: V of all ranks together; needed with ``axis``.

    Raises:
        ConfigError: labels that are not integers; on the CPU, a label that is no class. (On a GPU the loss is NaN then.)
        UsageError: shapes that do not fit.
    """
    share = None
    if axis is not None and axis.size > 1:
        if vocab_size is None:
            raise UsageError(
                "linear_cross_entropy with axis=, without vocab_size=",
                why="a rank has some rows of the weight, and the last ranks may have fewer",
                fix="pass vocab_size=, the number of classes of all ranks together",
            )
        share = Share.along(axis, vocab_size)
    elif vocab_size not in (None, weight.shape[0]):
        raise UsageError(
            f"vocab_size={vocab_size} with a weight of {weight.shape[0]} rows",
            why="without axis= the weight has a row for each class",
            fix="leave vocab_size out, or pass axis=world.axis('tp')",
        )
    return of_share(hidden, weight, labels, bias, share, _Options(ignore_index, label_smoothing, z_loss, chunk_size))


_MOST_LOGITS = 2**26  # that are held at once


class Share(NamedTuple):
    """What part of the classes a rank has: the name of the group of ranks that have them together, their number, the number of
    its first class, and how many classes there are."""

    group: str
    num_ranks: int
    first: int
    vocab_size: int

    @classmethod
    def along(cls, axis: Axis, vocab_size: int) -> "Share":
        """This rank's part of ``vocab_size`` classes that are cut over ``axis`` as ``torch.chunk`` does."""
        first = -(-vocab_size // axis.size) * axis.rank
        return cls(group_name(axis.group), axis.size, min(first, vocab_size), vocab_size)


class _Options(NamedTuple):
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_size: int | None = None


def of_share(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    share: Share | None,
    options: _Options = _Options(),  # noqa: B008  (it cannot be changed)
) -> Tensor:
    """:func:`linear_cross_entropy` of a rank's share of the classes; None: it has all."""
    _refuse_unfit(hidden, weight, labels, bias, share, options)
    if torch.is_autocast_enabled(hidden.device.type):  # as a linear layer does
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _LinearCrossEntropy.apply(rows, weight, bias, labels.reshape(-1).long(), share, options)


def _refuse_unfit(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, share: Share | None, options: _Options
) -> None:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ConfigError(
            f"labels of {labels.dtype} for a cross entropy",
            why="a label is the number of a class or token",
            fix="give integers, [...] for hidden [..., d]",
        )
    num_rows = weight.shape[0]
    fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:] and hidden.shape[:-1].numel() == labels.numel()
    if share is not None:
        first, total = share.first, share.vocab_size
        fits = fits and 0 < num_rows <= total - first
    if not fits or (bias is not None and bias.shape != (num_rows,)):
        shapes = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
        given = ", ".join(f"{name} {list(x.shape)}" for name, x in shapes.items() if x is not None)
        of_ranks = "" if share is None else f", of {share.vocab_size} classes from number {share.first} on"
        raise UsageError(
            f"linear_cross_entropy of {given}{of_ranks}",
            why="it takes hidden [..., d], weight [V, d], bias [V] and a label for each position of hidden",
            fix="give hidden as the head gets it, and labels of the same positions",
        )
    if not 0 <= options.label_smoothing <= 1 or (options.chunk_size is not None and options.chunk_size < 1):
        raise UsageError(
            f"label_smoothing={options.label_smoothing}, chunk_size={options.chunk_size}",
            why="a share is from 0 to 1, and a chunk has a position or more",
            fix="give numbers in these ranges",
        )
    if labels.device.type == "cpu":
        _refuse_unknown_label(labels, num_rows if share is None else share.vocab_size, options.ignore_index)


def _refuse_unknown_label(labels: Tensor, classes: int, ignore_index: int) -> None:
    strange = labels[(labels != ignore_index) & ((labels < 0) | (labels >= classes))]
    if strange.numel():
        raise ConfigError(
            f"a label {int(strange[0])} of {classes} classes",
            why=f"labels are from 0 to {classes - 1}, or {ignore_index} for what is not counted",
            fix="check the tokenizer, or the number of outputs of the head",
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """Rows [T, d], weight [V, d], bias [V], labels [T] -> sum. Saves the gradients; in float16 the inputs instead."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        share: Share | None,
        options: _Options,
    ) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        ctx.is_late, ctx.share, ctx.options = rows.dtype == torch.float16, share, options
        if share is not None:
            ctx.sides = share.group, "whole", ("whole", "part", "part")  # of rows, weight and bias
        now = (False, False, False) if ctx.is_late else wanted
        total, grads = _summed(rows, weight, bias, labels, share, options, now, None)
        ctx.save_for_backward(*((rows, weight, bias, labels) if ctx.is_late and any(wanted) else grads))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a gradient of a gradient (create_graph=True) through a cross entropy that is computed with its head",
                why="its logits are not kept, and its gradient is computed with the loss",
                fix="leave fused=True out, or take F.cross_entropy of the logits",
            )
        if ctx.is_late:
            rows, weight, bias, labels = ctx.saved_tensors
            wanted = tuple(ctx.needs_input_grad[:3])
            _, grads = _summed(rows, weight, bias, labels, ctx.share, ctx.options, wanted, grad)
        else:
            # In place: of a vocabulary these are large. Autograd refuses a second backward through them.
            grads = [None if x is None else x.mul_(grad) for x in ctx.saved_tensors]
        return (*grads, None, None, None)


def _summed(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    share: Share | None,
    options: _Options,
    wanted: tuple[bool, ...],
    factor: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and its gradients times ``factor`` for those of rows, weight and bias that are ``wanted``."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    num_rows, num_classes = weight.shape[0], weight.shape[0] if share is None else share.vocab_size
    # The same on all ranks, of which the last may have fewer rows.
    most_rows = num_rows if share is None else -(-num_classes // share.num_ranks)
    chunk_size = options.chunk_size or max(1, min(-(-len(rows) // 12), _MOST_LOGITS // most_rows))
    total = rows.new_zeros((), dtype=wide)
    of_rows = torch.empty_like(rows) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    of_bias = weight.new_zeros(num_rows, dtype=wide) if wanted[2] else None
    space = rows.new_empty(min(chunk_size, len(rows)), num_rows)
    for start in range(0, len(rows), chunk_size):
        x, y = rows[start : start + chunk_size], labels[start : start + chunk_size]
        logits = torch.mm(x, weight.t(), out=space[: len(x)])
        logits = (logits if bias is None else logits.add_(bias)).to(wide)
        lost, grads = _of_chunk(logits, y, share, num_classes, options)
        total += lost
        if not any(wanted):
            continue
        grads = (grads if factor is None else grads.mul_(factor)).to(rows.dtype)
        if of_rows is not None:
            torch.mm(grads, weight, out=of_rows[start : start + chunk_size])
        if of_weight is not None:
            if of_weight.dtype == rows.dtype:
                of_weight.addmm_(grads.t(), x)
            else:
                of_weight += torch.mm(grads.t(), x)
        if of_bias is not None:
            of_bias += grads.sum(0, dtype=wide)
    if of_rows is not None and share is not None:
        of_rows = sum_over(of_rows, share.group)
    narrow = [of_rows, of_weight, of_bias]
    return total, [None if x is None else x.to(rows.dtype) for x in narrow]


def _of_chunk(
    logits: Tensor, labels: Tensor, share: Share | None, num_classes: int, options: _Options
) -> tuple[Tensor, Tensor]:
    """The summed loss of some positions, and the gradients of their logits, in the same memory."""
    smoothing, z_loss = options.label_smoothing, options.z_loss
    is_valid = labels != options.ignore_index
    largest = logits.amax(1)
    if share is not None:
        largest = max_over(largest, share.group)
    place = labels - (0 if share is None else share.first)
    is_here = is_valid & (place >= 0) & (place < logits.shape[1])
    place = torch.where(is_here, place, 0).unsqueeze(1)
    target = torch.where(is_here, logits.gather(1, place).squeeze(1), 0)
    summed = [logits.sum(1)] if smoothing else []
    logits.sub_(largest.unsqueeze(1)).exp_()
    numbers = torch.stack([logits.sum(1), target, is_here.to(logits.dtype), *summed])
    if share is not None:
        numbers = sum_over(numbers, share.group)
    exps, target, num_found, *summed = numbers
    log_sum = largest + exps.log()
    losses = log_sum - (1 - smoothing) * target + z_loss * log_sum.square()
    if smoothing:
        losses = losses - smoothing / num_classes * summed[0]
    losses = torch.where(num_found == 1, losses, torch.nan)  # a label that is no class
    lost = torch.where(is_valid, losses, 0).sum()
    scale = torch.where(is_valid, (1 + 2 * z_loss * log_sum) / exps, 0)
    logits.mul_(scale.unsqueeze(1))
    if smoothing:
        # Cast first: a boolean times a Python number is float32.
        logits.sub_(is_valid.to(logits.dtype).mul_(smoothing / num_classes).unsqueeze(1))
    logits.scatter_add_(1, place, is_here.to(logits.dtype).mul_(smoothing - 1).unsqueeze(1))
    return lost, logits
