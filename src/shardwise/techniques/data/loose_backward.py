"""Completes the gradients of an FSDP2 backward outside a window, where no exchange before the step does it: sums those
of 0-dim parameters, which FSDP2 does not shard, and sets those that no rank used to None."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from shardwise.techniques.data.gradients import EndOfBackward, SetAsideGradients
from shardwise.techniques.data.penalties import PenaltyGradients
from shardwise.techniques.data.scalar_gradients import ScalarGradients
from shardwise.world import World

__all__ = ["LooseBackward"]


class LooseBackward:
    """Rounds of backwards outside windows. One round is the backwards whose gradients are reduced together: those of
    ``accumulate``, or a single one."""

    def __init__(
        self, params: list[nn.Parameter], whole: Iterable[int], used: Tensor, penalties: PenaltyGradients, world: World
    ):
        self.params, self.whole, self.used, self.penalties, self.world = params, list(whole), used, penalties, world
        self.summed: Callable[[], None] = lambda: None  # called after a single backward was reduced
        self._had: list[bool] | None = None  # which parameters had a gradient before the round; None: no round runs
        self._done = SetAsideGradients[int](params)  # gradients that are sums over the ranks already
        self._ending = EndOfBackward()

    @property
    def runs(self) -> bool:
        """Whether a round has begun and not ended."""
        self._forget_failed()
        return self._had is not None

    def begin(self) -> None:
        self._forget_failed()
        if self._had is not None:
            return
        self.used.zero_()
        self._had = [param.grad is not None for param in self.params]
        for i in self.whole:
            self._done.put(i)

    def begin_backward(self, *, ends: bool) -> None:
        """If ``ends``, makes the round (begun here or before) end with the running backward; otherwise ``accumulate``
        ends it. May only be called from inside a backward."""
        self._forget_failed()
        if ends and not self._ending.is_due:
            self.begin()
            self._ending.call(self._end_alone, last=True)  # FSDP2 ends its root's backward in a similar call

    def _end_alone(self) -> None:
        self._ending.forget()
        self.end("a backward outside a window")
        self.summed()

    def end(self, place: str) -> None:
        if self._had is None:
            return
        world = self.world
        params = [self.params[i] for i in self.whole]
        whole = ScalarGradients(params, self.penalties, world.axis("loss").size, counts=world.counts)
        entries = {"used": self.used, **whole.entries()}
        summed = self.world.agreement.sum(entries, f"{place}, after gradients are reduced")
        for param, had, count in zip(self.params, self._had, summed["used"].tolist(), strict=True):
            if not had and not count:
                param.grad = None
        whole.set(summed, [bool(summed["used"][i]) for i in self.whole])
        self._done.add_back()
        self.forget()

    def abandon(self) -> None:
        """Restores the gradients of unsharded parameters to those before the round."""
        self._forget_failed()
        if self._had is not None:
            self._done.put_back(self.whole)
        self.forget()

    def _forget_failed(self) -> None:
        if self._ending.was_dropped:
            self.forget()

    def forget(self) -> None:
        self._had = None
        self._ending.forget()
        self._done.clear()
