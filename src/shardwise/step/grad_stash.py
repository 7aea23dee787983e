"""Gradients from before a window, which are put aside, and restored or added back later."""

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from shardwise._torch.autograd import before_backward
from shardwise._torch.dtensor import local_tensor
from shardwise.errors import UsageError
from shardwise.parallel import Runtime
from shardwise.techniques.data.gradients import SetAsideGradients

__all__ = ["GradStash"]

_waiting: "weakref.WeakSet[GradStash]" = weakref.WeakSet()


class GradStash:
    """Gradients from before a window that are still there when its first backward, or ``torch.autograd.grad``, begins: they have been
    summed over the ranks already, so only what the window adds to them must be. Until then they stay in ``.grad``, where the loop may
    clear them, in whichever way.

    Args:
        runtime: of the window's model.
        waits: until then; False: they are put aside now.

    Attributes:
        is_taken: whether they were put aside.
        were_stepped: whether an optimizer has stepped with one of them, and nothing has cleared or changed it since.
    """

    def __init__(self, runtime: Runtime, *, waits: bool):
        self.runtime = runtime
        self.is_taken = self.were_stepped = False
        self._aside = SetAsideGradients[str](runtime.parameters)
        # Those of the window's begin; None: no code of the user's has run since.
        self._before = self._gradients() if waits else None
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
        for name, grad in self._gradients().items():
            before = grad if self._before is None else self._before.get(name)
            if grad is before:
                self._aside.put(name, without_history=True)
            elif before is not None and bool(local_tensor(grad).any()):
                raise UsageError(
                    "a gradient that was replaced within a window, where there was one from before it",
                    why="that one is a sum over the ranks, what the window adds is not yet: nothing tells whether both are in this one",
                    fix="clear gradients before the window, or as its first line: optim.zero_grad()",
                    name=name,
                )
        self._before = None

    def zero(self, ids: Collection[int], set_to_none: bool) -> None:
        """Does what ``zero_grad(set_to_none)`` does, to what was put aside of the parameters with these ``id()`` values."""
        kept = self._aside.kept
        for name in [name for name in kept if id(self.runtime.parameters[name]) in ids]:
            self.were_stepped = False
            if set_to_none:
                del kept[name]
            else:
                kept[name].zero_()

    def _gradients(self) -> dict[str, Tensor]:
        with self.runtime.torchs_classes():
            return {name: grad for name, param in self.runtime.parameters.items() if (grad := param.grad) is not None}

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
        self._before = None


def _begin(_outputs: Sequence[Any]) -> None:
    """Before a backward: gradients of windows that wait for their first one are put aside."""
    for stash in list(_waiting):
        stash.take()
