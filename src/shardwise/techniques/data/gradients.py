"""Helpers for gradients between two reductions, shared by both engines, backwards outside of windows, and windows.

They handle three problems of gradients that are reduced while a user's loop runs. A gradient that is a sum over the
ranks already would be summed again: :class:`SetAsideGradients` sets it aside while new gradients arrive, and adds it when they are
summed. A backward raises, and the work at its end is left undone: :class:`EndOfBackward` detects that. A micro-batch
that exists only so that all ranks have equally many must not count: :class:`Padding`.

A parameter that no rank used ends without a gradient: replicas send that in the last bucket (``replicas.py``); FSDP2
reduces zeros (``_torch/fsdp2.py``), which are removed by the exchange before the step (``step/exchange.py``) or after a
backward outside a window (``loose_backward.py``).
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from shardwise._torch.autograd import at_end_of_backward
from shardwise.techniques.edges import zero_of_padding

__all__ = ["EndOfBackward", "Padding", "SetAsideGradients", "add_to_gradient"]

K = TypeVar("K")


class EndOfBackward:
    """Calls one function at the end of the running backward, and detects a backward that raised. torch keeps the call
    until that backward is over, either way: if the call is gone and was not made, the backward has raised."""

    def __init__(self) -> None:
        self._call: weakref.ref[Any] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the backward that the call was registered in is still running."""
        return self._call is not None and self._call() is not None

    @property
    def was_dropped(self) -> bool:
        """Whether the backward that the call was registered in has raised."""
        return self._call is not None and self._call() is None

    def call(self, function: Callable[[], None], *, last: bool = False) -> None:
        """Calls ``function`` when the running backward ends; ``function`` calls :meth:`forget` when it is done.
        ``last``: after the other calls at that point. May only be called from inside a backward."""

        def end() -> None:
            function()

        def after_others() -> None:
            at_end_of_backward(end)

        self._call = weakref.ref(end)
        at_end_of_backward(after_others if last else end)

    def forget(self) -> None:
        """Resets: no call is due, and none was dropped."""
        self._call = None


class SetAsideGradients(Generic[K]):
    """Gradients that are set aside while new ones are accumulated into the same parameters.

    Args:
        params: the parameters, by name or by number.
    """

    def __init__(self, params: Mapping[K, nn.Parameter] | Sequence[nn.Parameter]):
        self._params: Any = params
        self.kept: dict[K, Tensor] = {}

    def put(self, key: K, *, without_history: bool = False) -> None:
        """Moves the gradient of a parameter out of ``.grad``, if it has one; ``without_history``: detached from its
        graph (create_graph)."""
        param = self._params[key]
        grad, param.grad = param.grad, None
        if grad is not None:
            self.kept[key] = grad.detach() if without_history else grad

    def add_back(self) -> None:
        """Adds the gradients that were set aside to those accumulated since."""
        for key, grad in self.kept.items():
            add_to_gradient(self._params[key], grad)

    def put_back(self, keys: Iterable[K]) -> None:
        """Restores the gradients of these parameters that were set aside; None where none was."""
        for key in keys:
            self._params[key].grad = self.kept.get(key)

    def clear(self) -> None:
        self.kept = {}


class Padding:
    """Sets gradients of a micro-batch that does not count to 0 on their way to the parameters.

    Args:
        has_reached: whether the running backward has reached outputs of the model; a weight penalty's own backward
            counts.
    """

    def __init__(self, has_reached: Callable[[], bool]):
        self.is_on = False
        self.hook: Callable[[Tensor], Tensor | None] | None = None  # on parameters; None: no padding so far
        self._has_reached = has_reached

    def set(self, is_on: bool, params: Iterable[nn.Parameter]) -> None:
        """Sets whether gradients of the next backwards become 0; the hook is registered once on each of ``params``."""
        self.is_on = is_on
        if is_on and self.hook is None:
            padding = weakref.ref(self)  # hooks are held in C++
            self.hook = zero_of_padding(
                lambda: (found := padding()) is not None and found.is_on and found._has_reached()
            )
            for param in params:
                param.register_hook(self.hook)


def add_to_gradient(param: nn.Parameter, part: Tensor) -> None:
    """Adds ``part`` to ``param.grad``, which may be None."""
    param.grad = part if param.grad is None else param.grad + part
