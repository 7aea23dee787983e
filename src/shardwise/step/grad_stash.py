"""What was there before a window, or before a micro-batch of it, and comes back: gradients and buffers."""

from collections.abc import Collection, Mapping

from torch import Tensor

from shardwise.model.tensors import tensors_of
from shardwise.parallel import Runtime

__all__ = ["GradStash", "clone_buffers", "restore_buffers"]


class GradStash:
    """Gradients from before a window, put aside when it is made: only the window's contribution is summed over ranks,
    what is there already has been."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._zeroed: set[str] = set()
        self._kept = {name: p.grad.detach() for name, p in runtime.parameters.items() if p.grad is not None}
        self._drop()

    def add_back(self) -> None:
        """Adds them to the window's, as one process would have."""
        for name, grad in self._kept.items():
            param = self.runtime.parameters[name]
            param.grad = grad if param.grad is None else param.grad + grad

    def put_back(self) -> None:
        """Gradients as before the window."""
        self._drop()
        self.add_back()

    def zero(self, ids: Collection[int], set_to_none: bool) -> None:
        """What ``zero_grad(set_to_none)`` does to gradients, for those that were put aside of parameters with these identities."""
        for name in [name for name in self._kept if id(self.runtime.parameters[name]) in ids]:
            if set_to_none:
                del self._kept[name]
            else:
                self._kept[name].zero_()
                self._zeroed.add(name)

    def forget(self) -> None:
        """Frees the copies."""
        self._kept = {}

    @property
    def names(self) -> list[str]:
        """Parameters whose gradients were put aside, and not cleared since."""
        return [name for name in self._kept if name not in self._zeroed]

    def _drop(self) -> None:
        for param in self.runtime.parameters.values():
            param.grad = None


def clone_buffers(runtime: Runtime) -> dict[str, Tensor]:
    """Copies of all buffers, for :func:`restore_buffers`."""
    return {name: buffer.clone() for name, buffer in tensors_of(runtime.module, "_buffers").items()}


def restore_buffers(runtime: Runtime, kept: Mapping[str, Tensor]) -> None:
    """Writes the values of ``kept`` back into the buffers of those names."""
    for name, buffer in tensors_of(runtime.module, "_buffers").items():
        if name in kept:
            buffer.copy_(kept[name])
