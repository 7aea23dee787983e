"""How losses are defined here: a sum over the micro-batch's valid tokens, and a count that depends on the batch alone.

Means cannot be combined: a mean of means weights a short micro-batch as much as a long one (measured: gradients
off by half). So losses are sums, the tokens of all ranks and micro-batches of a window are counted first, and each
sum is divided by that one number.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.config.keywords import public_call
from shardwise.data.batch import IGNORED
from shardwise.data.labels import Batch, valid_labels
from shardwise.errors import ConfigError, UsageError
from shardwise.model.calling import call
from shardwise.step.model_loss import ModelLoss, model_loss
from shardwise.step.step_state import StepState, batch_of_forward, with_state

Loss = Callable[[Any, Batch], Tensor | Mapping[str, Tensor]]
_TAKES = {"loss": "output, batch", "count": "batch", "forward": "model, batch"}


def next_token_loss(output: Any, batch: Batch) -> Tensor:
    """Cross entropy summed over the valid tokens of a micro-batch, in float32 or wider; 0-dim.

    Args:
        output: logits [B, T, V], or an object with ``.logits`` (Hugging Face).
        batch: with ``labels`` [B, T] aligned to the logits: ``labels[b, t]`` is the target of ``logits[b, t]``; -100 is
            ignored.
    """
    logits = output if isinstance(output, Tensor) else logits_of(output)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    labels = batch["labels"]
    if labels.is_floating_point():
        raise ConfigError(
            f"labels of {labels.dtype} for next_token_loss",
            why="it is a cross entropy: a label is the number of a class or token",
            fix='give a loss of your own: loss=lambda output, batch: F.mse_loss(output, batch["labels"], reduction="sum")',
        )
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def logits_of(output: Any) -> Tensor:
    """The ``.logits`` of a model output that is not a tensor."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    name, take = type(output).__name__, "output[...]"
    if isinstance(output, tuple | list):
        parts = [f"{list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__ for part in output]
        name, take = f"{name} of {', '.join(parts) or 'nothing'}", f"output[{next(_tensors_at(output), 0)}]"
    elif isinstance(output, Mapping):
        name = f"{name} with the keys {sorted(map(str, output))}"
    raise ConfigError(
        f"next_token_loss of a {name}",
        why="the default loss takes logits [B, T, V]: the model's output, or its .logits",
        fix=f"take them out: loss=lambda output, batch: sw.next_token_loss({take}, batch); "
        "or give a loss of your own for what the model returns, or loss=sw.model_loss for the loss that it computes itself",
    )


def _tensors_at(output: Any) -> Iterator[int]:
    return (i for i, part in enumerate(output) if isinstance(part, Tensor) and part.dim() > 1)


def as_micro_batches(batches: Any) -> list[Batch]:
    """The micro-batches of a window as a list.

    Raises:
        UsageError: one micro-batch instead of a list of them, or micro-batches that are no mappings of tensors.
    """
    if isinstance(batches, Mapping | Tensor):
        raise UsageError(
            f"a window that is a {type(batches).__name__}",
            why="a window is the list of micro-batches of one optimizer step",
            fix="pass a list: step([batch])",
        )
    found = list(batches)
    strange = next((batch for batch in found if not isinstance(batch, Mapping)), None)
    if strange is not None:
        raise UsageError(
            f"a micro-batch that is a {type(strange).__name__}",
            why="a micro-batch maps names to tensors, so that model, loss and count can each take theirs",
            fix='make it a dict: {"input": x, "labels": y}; sw.Loader does it for samples that are tuples',
        )
    return found


next_token_loss.count = valid_labels  # type: ignore[attr-defined]


def counter_of(model: Any, loss: Any, count: Callable[[Batch], Any] | None) -> Callable[[Batch], Any]:
    """:func:`count_of` for a call with ``loss=None``, which says that the model computes its loss: its own ``count`` comes
    before valid labels."""
    return count_of(loss, getattr(model, "count", None) if count is None and loss is None else count)


def counter_of_loop(model: Any, loss: Any, count: Callable[[Batch], Any] | None) -> Callable[[Batch], Any]:
    """:func:`count_of` for a loop of the user's own, in which nothing says what the loss is: a :class:`TaskModel` has its
    loss's count; an attribute ``count`` of another model may be anything."""
    return counter_of(model, loss, count) if isinstance(model, TaskModel) else count_of(loss, count)


def count_of(loss: Any, count: Callable[[Batch], Any] | None) -> Callable[[Batch], Any]:
    """The function that counts the tokens of a micro-batch: ``count`` if given, else ``loss.count``, else valid labels.

    The returned function raises ConfigError for a batch in which it finds nothing to count.
    """
    refuse_uncallable(count=count)
    own = getattr(loss, "count", None)
    found = next((found for found in (count, own) if callable(found)), valid_labels)
    return found if found is valid_labels or isinstance(found, _Count) else _Count(found)


@dataclass(frozen=True)
class _Count:
    """The user's ``count``, with an error that helps if it reads a key that the batch does not have."""

    count: Callable[[Batch], Any]

    def __call__(self, batch: Batch) -> Any:
        try:
            return self.count(batch)
        except KeyError as error:
            key = next((key for key in ("labels", *batch) if isinstance(batch.get(key), Tensor)), "x")
            raise ConfigError(
                f"a count that raises KeyError: {error} on a batch with the keys {sorted(map(str, batch))}",
                why="count(batch) is given a micro-batch, which maps names to tensors; Loader names the two of a tuple 'input' and 'labels'",
                fix=f"count what one sum of the loss runs over: count=lambda batch: batch[{key!r}].shape[0] (samples), or .numel() (numbers)",
            ) from error


def with_count(loss: Any, count: Callable[[Batch], Any] | None) -> Any:
    """``loss``; in place of :func:`model_loss`, one that is a mean over what ``count`` counts."""
    return ModelLoss(count_of(loss, count)) if loss is model_loss else loss


def refuse_uncallable(**given: Any) -> None:
    """Raises UsageError for an argument ``loss``, ``count`` or ``forward`` that is neither None nor a function."""
    for name, value in given.items():
        if value is not None and (not callable(value) or isinstance(value, type)):
            raise UsageError(
                f"{name}={value.__name__}, a class" if isinstance(value, type) else f"{name}={value!r}",
                why=f"it is called as {name}({_TAKES[name]}), once for each micro-batch",
                fix=f"pass {name}=lambda {_TAKES[name]}: ..., a function, or an object that can be called so",
            )


def forward_of(loss: Loss | None, forward: Callable[..., Any]) -> Callable[[nn.Module, Batch, StepState], Any]:
    """The function that calls the model: ``forward``; or, without a loss and with the default ``forward``, the module
    on the batch itself; with :func:`model_loss` and the default, the module on the batch with its labels. Each also receives
    the step's state if it takes one."""
    if isinstance(loss, ModelLoss) and forward is call:
        return with_state(loss.forward)
    return batch_of_forward if loss is None and forward is call else with_state(forward)


def as_sums(result: Any) -> dict[str, Tensor]:
    """What a loss returned, as a dict name -> 0-dim sum, ``"loss"`` first.

    Raises:
        ConfigError: it is neither a 0-dim tensor nor a mapping of them with the key ``"loss"``.
        UsageError: it is a DTensor: a term of it computes with shards.
    """
    sums = dict(result) if isinstance(result, Mapping) else {"loss": result}
    if "loss" not in sums:
        raise ConfigError(
            f"a loss that returns the keys {sorted(sums)}",
            why='the key "loss" is the one that is differentiated',
            fix='return {"loss": total, ...}',
        )
    for name, value in sums.items():
        if value is None:
            raise ConfigError(
                f"a loss whose {name!r} is None",
                why="it returns nothing, or it takes the loss that the model computes itself, and the model was given no labels: the default "
                "forward leaves them out",
                fix="return the sum; to train with the loss that the model computes, pass loss=sw.model_loss, which gives it labels and makes its "
                "mean a sum",
            )
        if isinstance(value, tuple | list) or hasattr(value, "loss"):
            raise ConfigError(
                f"a loss whose {name!r} is what the model returned, a {type(value).__name__}",
                why="with loss=None the forward returns the sum itself, and every entry is a 0-dim tensor",
                fix="for a mean that the model computes: loss=sw.model_loss; a sum is taken out of what it returns: loss=None, "
                "forward=lambda model, batch: model(...)[1], or model(...).loss",
            )
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"a loss whose {name!r} is of type {type(value).__name__}",
                why="every entry is a 0-dim tensor, the sum over this micro-batch; a Python number has lost its gradient, "
                "and reading it waits for the device",
                fix="return a tensor: drop float() / .item()",
            )
        if isinstance(value, DTensor):
            raise UsageError(
                f"a loss whose {name!r} is cut over the ranks, as a parameter is",
                why="a term of it computes with a parameter outside of the model's forward, of which each rank has a shard",
                fix="a penalty on weights: weight_decay= of the optimizer, or sw.parameter_penalty in a loop of your own; other code that "
                'computes with parameters belongs into a forward: sw.TaskModel(model, loss) with Sharding(units="none")',
            )
        if value.dim() != 0:
            raise ConfigError(
                f"a loss whose {name!r} is {tuple(value.shape)}",
                why="every entry is the sum over this micro-batch: one number",
                fix='use reduction="sum", or .sum(); of what a model returned take the loss alone: output["loss"], or, if it is a mean, '
                "loss=sw.model_loss",
            )
    return sums


class TaskModel(nn.Module):
    """A model and its loss as one module, for a loss that has parameters: ``forward(batch)`` returns the sum. A
    subclass may take ``forward(batch, state)``, with the step's :class:`StepState`.

    Use it with ``TrainStep(task, optim, loss=None, count=...)``; where the loss has a ``count`` of its own, the task has it
    too, and ``count=`` may be left out. Its weights are saved and loaded as those of
    ``model``, under the names they have there; the loss's own are saved next to them.

    Args:
        model: computes the output.
        loss: ``loss(output, batch)`` -> sum over the micro-batch, 0-dim, or a mapping of sums; may be a module.
        forward: how to call the model on a batch: ``forward(model, batch)``, or ``forward(model, batch, state)``.
    """

    takes_batch = True  # its forward takes a micro-batch whole: see shardwise.model.calling
    _weights_of = "model"  # weights are saved for the model without the task: see shardwise.state.naming

    @public_call()
    def __init__(self, model: nn.Module, loss: Loss, *, forward: Callable[..., Any] = call):
        super().__init__()
        self.model, self.loss, self.run = model, loss, forward
        if callable(getattr(loss, "count", None)):
            self.count = loss.count  # type: ignore[attr-defined]

    def forward(self, batch: Batch, state: StepState | None = None) -> Tensor | Mapping[str, Tensor]:
        return self.loss(with_state(self.run)(self.model, batch, state), batch)
