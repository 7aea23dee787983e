"""Helpers for gradients until they are summed, shared by both engines and windows.

A backward raises, and the work at its end is left undone: :class:`EndOfBackward` detects that. A micro-batch that exists only so that all ranks have equally many must not count: :class:`Padding`.

A parameter that no rank used ends without a gradient: the exchange before the step says so (``step/exchange.py``). Until then replicas
and FSDP2 (``_torch/fsdp2.py``) have summed zeros.
"""

import enum
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shardwise._torch.autograd import at_end_of_backward
from shardwise.errors import UsageError
from shardwise.techniques.edges import zero_of_padding


class State(enum.Enum):
    """What becomes of a gradient of an engine's model that is made now. A window takes the states in this order:

    begin       OUTSIDE -> KEPT    each micro-batch adds to the others
    set_last    KEPT -> SENT       in the last one they are summed while backward still runs
    complete    SENT -> SUMMED     the rest is; with the exchange before the step ranks learn what came late, and what none has used
    end         SUMMED -> OUTSIDE  gradients are final, and the optimizer's
    abandon     any -> OUTSIDE     an exception has left the window: they are what they were before it
    """

    OUTSIDE = enum.auto()  # of any window: on several ranks no backward may come to parameters
    KEPT = enum.auto()  # in .grad, or whole beside the shards
    SENT = enum.auto()  # until its bucket, or its unit, is complete
    SUMMED = enum.auto()  # none is made


class EndOfBackward:
    """Calls one function at the end of the running backward, and detects a backward that raised. torch keeps the call
    until that backward is over, either way: if the call is gone and was not made, the backward has raised."""

    def __init__(self) -> None:
        self._call: weakref.ref[Any] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the backward that the call was registered in is still running."""
        return self._call is not None and self._call() is not None

    def call(self, function: Callable[[], None]) -> None:
        """Calls ``function`` when the running backward ends; ``function`` calls :meth:`forget` when it is done. May only be called from
        inside a backward."""

        def end() -> None:
            function()

        self._call = weakref.ref(end)
        at_end_of_backward(end)

    def forget(self) -> None:
        """Resets: no call is due, and none was dropped."""
        self._call = None


class Padding:
    """Sets gradients of a micro-batch that does not count to 0 on their way to the parameters."""

    def __init__(self) -> None:
        self.is_on = False
        self.hook: Callable[[Tensor], Tensor | None] | None = None  # on parameters; None: no padding so far

    def set(self, is_on: bool, params: Iterable[nn.Parameter]) -> None:
        """Sets whether gradients of the next backwards become 0; the hook is registered once on each of ``params``."""
        self.is_on = is_on
        if is_on and self.hook is None:
            padding = weakref.ref(self)  # hooks are held in C++
            self.hook = zero_of_padding(lambda: (found := padding()) is not None and found.is_on)
            for param in params:
                param.register_hook(self.hook)


def add_to_gradient(param: nn.Parameter, part: Tensor) -> None:
    """Adds ``part`` to ``param.grad``, which may be None."""
    param.grad = part if param.grad is None else param.grad + part


def outside_of_windows(num: int, *, name: str | None = None, what: str = "a backward") -> UsageError:
    """The error for ``what`` that comes to parameters of a model outside of its windows.

    Args:
        num: over how many ranks gradients are summed.
        name: of a parameter, if it is known.
    """
    return UsageError(
        f"{what} of a sharded model outside of a window",
        why=(
            f"gradients are summed over {num} ranks in a window, and divided by what all of them count: a mean on each rank would be {num} times "
            "too large"
            if num > 1
            else "each rank has a part of some gradients, and the parts are summed when a window ends"
        )
        + "; outside of one nothing says when they are complete",
        fix="`with sw.window(model, batches) as w:`, in it `for b in w: (loss_sum(model, b) / w.num_tokens).backward()`; or step(batches) of a "
        "sw.TrainStep; or, micro-batch by micro-batch, num = sw.count_tokens(model, batches), then `with sw.accumulate(model, is_last=...): "
        "(loss_sum / num).backward()`. For gradients of the inputs alone: torch.autograd.grad(loss, inputs), or model.requires_grad_(False) of a "
        "model that is not trained",
        name=name,
    )
