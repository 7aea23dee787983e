"""What FSDP2 leaves undone for a backward outside a window, where no exchange before the step does it: summing gradients of
0-dim parameters, which it keeps whole, and leaving None what no rank used."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shardwise._torch.autograd import at_end_of_backward
from shardwise.techniques.data.penalties import PenaltyGradients, add_to_gradient
from shardwise.techniques.data.scalar_gradients import ScalarGradients
from shardwise.world import World

__all__ = ["LooseBackward"]


class LooseBackward:
    """One round is the backwards whose gradients are reduced together: those of ``accumulate``, or one by itself."""

    def __init__(
        self, params: list[nn.Parameter], whole: Iterable[int], used: Tensor, apart: PenaltyGradients, world: World
    ):
        self.params, self.whole, self.used, self.apart, self.world = params, list(whole), used, apart, world
        self.summed: Callable[[], None] = lambda: None  # called when one backward by itself was summed
        self._had: list[bool] | None = None  # which had a gradient before the round; None: no round runs
        self._done: dict[int, Tensor] = {}  # gradients that are sums over the ranks already
        self._queued: weakref.ref[Any] | None = None

    @property
    def runs(self) -> bool:
        """Whether a round has begun that has not ended."""
        self._forget_failed()
        return self._had is not None

    def begin(self) -> None:
        self._forget_failed()
        if self._had is not None:
            return
        self.used.zero_()
        self._had = [param.grad is not None for param in self.params]
        for i in self.whole:
            grad = self.params[i].grad
            if grad is not None:
                self._done[i], self.params[i].grad = grad, None

    def begin_backward(self, *, ends: bool) -> None:
        """A round that ends with the backward that runs, perhaps begun before; unless not ``ends``: ``accumulate`` ends it.
        Only from within a backward."""
        self._forget_failed()
        if not ends or self._queued is not None:
            return

        def end() -> None:
            self._queued = None
            self.end("a backward outside a window")
            self.summed()

        def after_others() -> None:  # FSDP2 ends its root's backward in such a call of its own
            at_end_of_backward(end)

        self.begin()
        self._queued = weakref.ref(end)
        at_end_of_backward(after_others)

    def end(self, place: str) -> None:
        if self._had is None:
            return
        world = self.world
        params = [self.params[i] for i in self.whole]
        whole = ScalarGradients(params, self.apart, world.axis("loss").size, counts=world.counts)
        entries = {"used": self.used, **whole.entries()}
        summed = self.world.agreement.sum(entries, f"{place}, after gradients are reduced")
        for param, had, count in zip(self.params, self._had, summed["used"].tolist(), strict=True):
            if not had and not count:
                param.grad = None
        whole.set(summed, [bool(summed["used"][i]) for i in self.whole])
        for i, done in self._done.items():
            add_to_gradient(self.params[i], done)
        self.forget()

    def abandon(self) -> None:
        """Gradients of whole parameters as before the round."""
        self._forget_failed()
        if self._had is not None:
            for i in self.whole:
                self.params[i].grad = self._done.get(i)
        self.forget()

    def _forget_failed(self) -> None:
        """torch holds the call at the end of a backward until it is over: a backward that raised made none."""
        if self._queued is not None and self._queued() is None:
            self.forget()

    def forget(self) -> None:
        self._had, self._queued = None, None
        self._done.clear()
