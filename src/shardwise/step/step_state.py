"""The step number, epoch and micro-batch that a forward may ask for: for an annealed loss, a layer with warmup, a
log."""

import contextlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class StepState:
    """The optimizer step in which a forward is called; equal on every rank except for ``micro_batch``.

    Attributes:
        step: number of this window, from 1, like ``StepOutput.step`` afterwards; in an evaluation the windows trained
            so far.
        micro_batch: index of this micro-batch among those of all ranks in the window, from 0; in an evaluation among
            all its batches. A copy that is not counted has the index of the batch it is a copy of.
        epoch: of the ``Loader`` that the batch is from, from 0; None: the batch is from elsewhere.
        samples: samples of that epoch before this window; None: as for ``epoch``.
        is_training: False in an evaluation.
    """

    step: int
    micro_batch: int = 0
    epoch: int | None = None
    samples: int | None = None
    is_training: bool = True

    @classmethod
    def at(
        cls, step: int, batch: Mapping[str, Tensor], index: int | None = None, *, is_training: bool = True
    ) -> "StepState":
        """The state for a micro-batch: epoch and samples as the ``Loader`` noted them on it; ``index`` in place of the
        batch's own index."""
        epoch, samples = getattr(batch, "window", None) or (None, None)
        index = getattr(batch, "index", 0) if index is None else index
        return cls(step, index, epoch, samples, is_training)


def with_state(forward: Callable[..., Any]) -> Callable[[nn.Module, Any, StepState | None], Any]:
    """``forward(model, batch)`` as a function of model, batch and state. The state is passed on if ``forward`` has a
    parameter ``state`` without a default, or one annotated with :class:`StepState`."""
    name = _state_parameter(forward)
    if name is None:
        return lambda model, batch, state: forward(model, batch)
    return lambda model, batch, state: forward(model, batch, **{name: state})


def batch_of_forward(model: nn.Module, batch: Any, state: StepState) -> Any:
    """Calls ``model(batch)``, with the state passed on as :func:`with_state` does."""
    name = _state_parameter(model.forward)
    return model(batch) if name is None else model(batch, **{name: state})


def _state_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the parameter that takes a state; not an unannotated ``state=None``, which is a recurrent model's
    own."""
    parameters = _parameters(function)
    for parameter in parameters:
        is_asked_for = parameter.name == "state" and parameter.default is parameter.empty
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and (
            is_asked_for or _is_state(parameter.annotation)
        ):
            return parameter.name
    return None


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a signature, with annotations resolved; as text where they cannot be (imported for a type
    checker only)."""
    for eval_str in (True, False):
        with contextlib.suppress(Exception):  # a builtin has no signature; and an annotation's text may raise anything
            return list(inspect.signature(function, eval_str=eval_str).parameters.values())
    return []


def _is_state(annotation: Any) -> bool:
    """Whether an annotation is :class:`StepState`, or a union with it."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return _IN_TEXT.search(annotation) is not None
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(_is_state(one) for one in typing.get_args(annotation))
    return annotation is StepState


_IN_TEXT = re.compile(rf"(?<!\w){StepState.__name__}(?!\w)")
