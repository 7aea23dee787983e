"""Gradients from before a window, which are put aside, and restored or added back later."""

from collections.abc import Collection

from shardwise.parallel import Runtime
from shardwise.techniques.data.gradients import SetAsideGradients

__all__ = ["GradStash"]


class GradStash:
    """Gradients that exist when a window begins, put aside on construction: they have been summed over the ranks
    already, so only what the window adds to them must be."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._zeroed: set[str] = set()
        self._aside = SetAsideGradients[str](runtime.parameters)
        with runtime.torchs_classes():
            for name, param in runtime.parameters.items():
                if param.grad is not None:
                    self._aside.put(name, without_history=True)

    def add_back(self) -> None:
        """Adds the put-aside gradients to those of the window, as one process would have accumulated them."""
        self._aside.add_back()

    def put_back(self) -> None:
        """Restores the gradients from before the window."""
        self._aside.put_back(self.runtime.parameters)

    def zero(self, ids: Collection[int], set_to_none: bool) -> None:
        """Does what ``zero_grad(set_to_none)`` does, to the put-aside gradients of the parameters with these ``id()``
        values."""
        kept = self._aside.kept
        for name in [name for name in kept if id(self.runtime.parameters[name]) in ids]:
            if set_to_none:
                del kept[name]
            else:
                kept[name].zero_()
                self._zeroed.add(name)

    def forget(self) -> None:
        """Frees the copies."""
        self._aside.clear()

    @property
    def names(self) -> list[str]:
        """Parameters whose gradients were put aside and have not been cleared since."""
        return [name for name in self._aside.kept if name not in self._zeroed]
