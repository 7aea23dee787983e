"""What both engines, a backward outside of windows, and a window keep of gradients between two sums over the ranks; each once.

Three things go wrong with gradients that are summed while a user's loop runs. A sum that is there already is summed again: it is put
aside (:class:`Aside`) while new gradients come, and added to them when they are sums too. A backward raises, and what was to be done at
its end is left half done: :class:`EndOfBackward` knows. And a micro-batch that is only there so that ranks have equally many must not count:
:class:`Padding`. A parameter that no rank used ends without a gradient: replicas say so in the last bucket (``replicas.py``), FSDP2 reduces
zeros (``_torch/fsdp2.py``), which are taken away by the exchange before the step (``step/exchange.py``) or after a loose backward.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from shardwise._torch.autograd import at_end_of_backward
from shardwise.techniques.edges import zero_of_padding

__all__ = ["Aside", "EndOfBackward", "Padding", "add_to_gradient"]

K = TypeVar("K")


class EndOfBackward:
    """One call at the end of the backward that runs. torch holds the call until that backward is over, one way or the other: one that is
    gone without having been made tells of a backward that raised."""

    def __init__(self) -> None:
        self._call: weakref.ref[Any] | None = None

    @property
    def is_due(self) -> bool:
        """The backward for which there is a call still runs."""
        return self._call is not None and self._call() is not None

    @property
    def was_dropped(self) -> bool:
        """The backward for which there was a call has raised."""
        return self._call is not None and self._call() is None

    def call(self, function: Callable[[], None], *, last: bool = False) -> None:
        """Calls ``function``, which says :meth:`forget` when it is done, when the backward that runs ends; ``last``: after what others call
        then. Only from within a backward."""

        def end() -> None:
            function()

        def after_others() -> None:
            at_end_of_backward(end)

        self._call = weakref.ref(end)
        at_end_of_backward(after_others if last else end)

    def forget(self) -> None:
        """There is no call, and none was dropped."""
        self._call = None


class Aside(Generic[K]):
    """Gradients that are put aside while others come to the same parameters.

    Args:
        params: by name, or by number.
    """

    def __init__(self, params: Mapping[K, nn.Parameter] | Sequence[nn.Parameter]):
        self._params: Any = params
        self.kept: dict[K, Tensor] = {}

    def put(self, key: K, *, without_history: bool = False) -> None:
        """Moves the gradient of a parameter out of ``.grad``, if it has one; ``without_history``: what made it (create_graph) is let go."""
        param = self._params[key]
        grad, param.grad = param.grad, None
        if grad is not None:
            self.kept[key] = grad.detach() if without_history else grad

    def add_back(self) -> None:
        """Adds them to what has come since."""
        for key, grad in self.kept.items():
            add_to_gradient(self._params[key], grad)

    def put_back(self, keys: Iterable[K]) -> None:
        """The gradients of these parameters are again those that were put aside: none where none was."""
        for key in keys:
            self._params[key].grad = self.kept.get(key)

    def clear(self) -> None:
        self.kept = {}


class Padding:
    """Gradients of a micro-batch that does not count are made 0 on their way to parameters.

    Args:
        has_reached: whether the backward that runs has come to what the model computed; a penalty's own backward counts.
    """

    def __init__(self, has_reached: Callable[[], bool]):
        self.is_on = False
        self.hook: Callable[[Tensor], Tensor | None] | None = None  # on parameters; None: there was no padding yet
        self._has_reached = has_reached

    def set(self, is_on: bool, params: Iterable[nn.Parameter]) -> None:
        """Whether gradients of the next backwards are made 0; ``params``, on which the hook is put once."""
        self.is_on = is_on
        if is_on and self.hook is None:
            padding = weakref.ref(self)  # hooks are held in C++
            self.hook = zero_of_padding(
                lambda: (found := padding()) is not None and found.is_on and found._has_reached()
            )
            for param in params:
                param.register_hook(self.hook)


def add_to_gradient(param: nn.Parameter, part: Tensor) -> None:
    """Adds ``part`` to ``param.grad``, where there may be none."""
    param.grad = part if param.grad is None else param.grad + part
