"""What a forward may know of the step that it runs in: for a loss that is annealed, a layer that is warmed up, a log."""

import contextlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["StepState", "batch_of_forward", "with_state"]


@dataclass(frozen=True)
class StepState:
    """The step that a forward is called in; equal on every rank but for ``micro_batch``.

    Attributes:
        step: number of this window, from 1, as ``StepOutput.step`` has it afterwards; in an evaluation the windows trained so far.
        micro_batch: index of this micro-batch among those of all ranks in the window, from 0; in an evaluation among all its batches,
            and a copy that counts as nothing has that of the batch it is a copy of.
        epoch: of the ``Loader`` that the batch is from, from 0; None: the batch is from elsewhere.
        samples: samples of that epoch before this window; None likewise.
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
        """That of a micro-batch: its place is what the ``Loader`` noted on it; ``index`` where the batch does not know its own."""
        epoch, samples = getattr(batch, "window", None) or (None, None)
        index = getattr(batch, "index", 0) if index is None else index
        return cls(step, index, epoch, samples, is_training)


def with_state(forward: Callable[..., Any]) -> Callable[[nn.Module, Any, StepState | None], Any]:
    """``forward(model, batch)`` as a function of a state too, which is passed on where the forward takes one: where it has a parameter
    ``state`` without a default, or one annotated with :class:`StepState`."""
    name = _state_parameter(forward)
    if name is None:
        return lambda model, batch, state: forward(model, batch)
    return lambda model, batch, state: forward(model, batch, **{name: state})


def batch_of_forward(model: nn.Module, batch: Any, state: StepState) -> Any:
    """``model(batch)``, the state passed on as :func:`with_state` does."""
    name = _state_parameter(model.forward)
    return model(batch) if name is None else model(batch, **{name: state})


def _state_parameter(function: Callable[..., Any]) -> str | None:
    """The parameter that takes a state; not ``state=None`` without a word of its type, which is a recurrent model's own."""
    parameters = _parameters(function)
    for parameter in parameters:
        is_asked_for = parameter.name == "state" and parameter.default is parameter.empty
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and (
            is_asked_for or _is_state(parameter.annotation)
        ):
            return parameter.name
    return None


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Of a signature, annotations as what they name; as text where that cannot be found (imported for a type checker alone)."""
    for eval_str in (True, False):
        with contextlib.suppress(Exception):  # a builtin; and text that names anything may raise anything
            return list(inspect.signature(function, eval_str=eval_str).parameters.values())
    return []


def _is_state(annotation: Any) -> bool:
    """Whether that is :class:`StepState`, or one of several types of which it is one."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return _IN_TEXT.search(annotation) is not None
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(_is_state(one) for one in typing.get_args(annotation))
    return annotation is StepState


_IN_TEXT = re.compile(rf"(?<!\w){StepState.__name__}(?!\w)")
