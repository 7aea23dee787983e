"""``loss=sw.model_loss``: models that compute their loss themselves, as ``(logits, loss)`` or an object with ``.loss``.

Such a loss is a mean over the micro-batch. Multiplied by what the mean runs over it is a sum, which can be added to those of
other micro-batches and ranks. That it is a mean over what is counted is tried by
:class:`~shardwise.step.loss_check.LossCheck`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.data.labels import Batch, valid_labels
from shardwise.errors import ConfigError, UsageError
from shardwise.model.calling import TARGETS, arguments_of

_FIX_OUTPUT = "return (logits, loss) or an object with .loss from the model's forward; or give a loss of your own: loss=lambda output, batch: ..."


@dataclass(frozen=True)
class ModelLoss:
    """The model's own mean loss, as a sum: the mean times ``count(batch)``.

    Attributes:
        count: what the model's mean runs over: ``count(batch)`` -> tokens, or samples.
    """

    count: Callable[[Batch], Any] = valid_labels

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """The sum over a micro-batch, 0-dim, in float32 or wider.

        Args:
            output: what the model returned: ``(logits, loss)`` in any order, an object or mapping with ``loss``, or the loss.
            batch: the micro-batch.
        """
        mean = loss_of_output(output)
        mean = mean.float() if mean.dtype in (torch.float16, torch.bfloat16) else mean
        count = torch.as_tensor(self.count(batch), dtype=mean.dtype, device=mean.device)
        # The mean over no items is NaN; their sum is 0.
        return torch.where(count > 0, mean * count, torch.zeros_like(mean))

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Calls the model on the whole batch, labels too: as its parameter ``labels``, or the one that is named so in other
        words (``targets``, ``target``, ``label``, ``y``).

        A model of transformers that shifts labels itself is also given them as ``shift_labels``: here they are shifted already.
        """
        if "labels" not in batch:
            args, kwargs = arguments_of(model, batch)
            return model(*args, **kwargs)
        name = _parameter_of_labels(model)
        args, kwargs = arguments_of(model, {key: value for key, value in batch.items() if key != name}, given={name})
        return model(*args, **{**kwargs, name: batch["labels"], **self._of_transformers(model, batch)})

    def _of_transformers(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """What models of transformers pass on to their loss: labels that are shifted already, and the number of items that
        divides the sum, which for a micro-batch without a label is not 0."""
        own = getattr(model, "loss_function", None)
        if not callable(own) or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return {}
        taken = inspect.signature(own).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()):
            return {}
        given = {}
        if "shift_labels" in taken:
            given["shift_labels"] = batch["labels"]
        if "num_items_in_batch" in taken:
            given["num_items_in_batch"] = torch.as_tensor(self.count(batch)).clamp(min=1)
        return given


def model_loss(output: Any, batch: Batch) -> Tensor:
    """The loss that a model computes itself, as a sum over the micro-batch: ``TrainStep(model, optim, loss=sw.model_loss)``.

    The model returns ``(logits, loss)``, or an object or a mapping with ``loss``, where ``loss`` is a mean over the labels that
    are not -100, or over what ``count=`` counts. The default ``forward`` then gives the model its labels. That it is such a
    mean, of labels that are shifted once, is tried in the first window.

    Args:
        output: what the model returned.
        batch: the micro-batch, with ``labels``.

    Returns:
        0-dim, in float32 or wider.

    Raises:
        ConfigError: there is no loss in the output.
    """
    return ModelLoss()(output, batch)


model_loss.count = valid_labels  # type: ignore[attr-defined]


def loss_of_output(output: Any) -> Tensor:
    """The loss in what a model returned: its ``.loss`` or ``["loss"]``, the only 0-dim tensor of a tuple, or the output itself.

    Raises:
        ConfigError: there is none, several, or it is no single floating number.
    """
    if isinstance(output, Tensor):
        found = output
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        numbers = [part for part in output if isinstance(part, Tensor) and part.dim() == 0]
        if len(numbers) > 1:
            raise ConfigError(
                f"model_loss of a {type(output).__name__} with {len(numbers)} numbers",
                why="any of them may be the loss",
                fix="take it out: forward=lambda model, batch: model(...)[1]",
            )
        found = numbers[0] if numbers else None
    else:
        found = getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point():
        return found
    raise ConfigError(
        f"model_loss of {_shown(output)}",
        why="the model computed no loss: one number, a mean over the micro-batch"
        + ("" if found is None else f"; what stands in its place is {_shown(found)}"),
        fix=_FIX_OUTPUT,
    )


def said_forward(model: nn.Module, batch: Batch, output: Any) -> str:
    """As text: a ``forward=`` that calls the model with its labels and takes the loss out of what it returned, ``output``."""
    try:
        labels = _parameter_of_labels(model)
        args, kwargs = arguments_of(model, {key: x for key, x in batch.items() if key != labels}, given={labels})
        keys = {id(value): key for key, value in batch.items()}
        given = [f"batch[{keys[id(x)]!r}]" for x in args]
        given += [f"{name}=batch[{keys[id(x)]!r}]" if id(x) in keys else f"{name}={x}" for name, x in kwargs.items()]
        call = ", ".join([*given, f"{labels}=batch['labels']"])
    except (UsageError, KeyError):
        call = "..., batch['labels']"
    take = ""
    if isinstance(output, Mapping):
        take = "['loss']"
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        take = f"[{next((i for i, x in enumerate(output) if isinstance(x, Tensor) and x.dim() == 0), 1)}]"
    elif not isinstance(output, Tensor):
        take = ".loss"
    return f"forward=lambda model, batch: model({call}){take}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(_shown(part) for part in value) or 'nothing'}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    return f"a {type(value).__name__}" if value is not None else "None"


def _parameter_of_labels(model: nn.Module) -> str:
    """The name of the forward's parameter that takes the labels."""
    parameters = inspect.signature(model.forward).parameters
    names = ["labels"] if "labels" in parameters else [name for name in parameters if name in TARGETS]
    if len(names) == 1:
        return names[0]
    if not names and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "labels"
    raise UsageError(
        f"model_loss with {type(model).__name__}.forward({', '.join(parameters)})",
        why=f"{'each of ' + str(names) + ' may be' if names else 'none of its parameters is named as'} the labels, of which the model computes its loss",
        fix='say how it is called: forward=lambda model, batch: model(batch["input_ids"], batch["labels"])',
    )
