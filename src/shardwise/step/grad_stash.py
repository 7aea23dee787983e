"""Gradients from before a window, which are put aside, and restored or added back later."""

import weakref
from collections.abc import Sequence
from typing import Any

from shardwise._torch.autograd import before_backward
from shardwise.parallel import Runtime
from shardwise.techniques.data.gradients import SetAsideGradients

__all__ = ["GradStash"]

_waiting: "weakref.WeakSet[GradStash]" = weakref.WeakSet()


class GradStash:
    """Gradients that are there when the first backward of a window begins: they have been summed over the ranks already, so only what
    the window adds to them must be. Until then they stay in ``.grad``, where the loop may clear them, in whichever way.

    Args:
        runtime: of the window's model.
        waits: until the first backward; False: they are put aside now.

    Attributes:
        is_taken: whether that backward has begun.
        were_stepped: whether an optimizer has stepped with one of them, and nothing has cleared or changed it since.
    """

    def __init__(self, runtime: Runtime, *, waits: bool):
        self.runtime = runtime
        self.is_taken = self.were_stepped = False
        self._aside = SetAsideGradients[str](runtime.parameters)
        if not waits:
            self.take()
            return
        _waiting.add(self)
        before_backward(_begin)

    def take(self) -> None:
        """Puts the gradients aside, unless that was done."""
        if self.is_taken:
            return
        _waiting.discard(self)
        self.is_taken, self.were_stepped = True, self.runtime.holds_stepped_gradient()
        with self.runtime.torchs_classes():
            for name, param in self.runtime.parameters.items():
                if param.grad is not None:
                    self._aside.put(name, without_history=True)

    def add_back(self) -> None:
        """Adds the put-aside gradients to those of the window, as one process would have accumulated them."""
        self._aside.add_back()

    def put_back(self) -> None:
        """Restores the gradients from before the window."""
        if self.is_taken:
            self._aside.put_back(self.runtime.parameters)
        self.forget()

    def forget(self) -> None:
        """Frees the copies."""
        _waiting.discard(self)
        self._aside.clear()


def _begin(_outputs: Sequence[Any], accumulates: bool) -> None:
    """Before a backward: gradients of windows that wait for their first one are put aside."""
    for stash in list(_waiting) if accumulates else ():
        stash.take()
