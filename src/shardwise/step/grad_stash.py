"""Gradients from before a window, which are put aside, and restored or added back later."""

import weakref
from collections.abc import Collection

from torch import Tensor

from shardwise._torch.autograd import Backward, before_backward, path_of
from shardwise._torch.dtensor import local_tensor
from shardwise.errors import UsageError
from shardwise.parallel import Runtime
from shardwise.parallel.runtime import runtimes_in_use
from shardwise.parallel.step_checks import LastStep
from shardwise.techniques.data.gradients import add_to_gradient

_waiting: "weakref.WeakSet[GradStash]" = weakref.WeakSet()


class GradStash:
    """Gradients from before a window that are still there when its first backward, or ``torch.autograd.grad`` of parameters, begins: they have been
    summed over the ranks already, so only what the window adds to them must be. Until then they stay in ``.grad``, where the loop may
    clear them, in whichever way.

    Args:
        runtime: of the window's model.
        waits: until then; False: they are put aside now.

    Attributes:
        is_taken: whether they were put aside.
    """

    def __init__(self, runtime: Runtime, *, waits: bool):
        self.runtime = runtime
        self.is_taken = False
        self._stepped: Tensor | None = None  # one that an optimizer has stepped with, and nothing has replaced
        self._aside: dict[str, Tensor] = {}
        # Those of the window's begin, with their versions; None: no code of the user's has run since.
        self._before = (
            {name: (grad, local_tensor(grad)._version) for name, grad in self._gradients().items()} if waits else None
        )
        self._cleared: set[str] = set()  # of these, by zero_grad()
        if not waits:
            self.take()
            return
        _waiting.add(self)
        before_backward(_begin)

    @property
    def has_any(self) -> bool:
        """Whether there were gradients when the window began."""
        return bool(self._before)

    def take(self) -> None:
        """Puts the gradients aside, unless that was done. Called before any gradient of the window is summed.

        Raises:
            UsageError: one that was written or replaced, and may be a sum over the ranks with something of this rank in it.
        """
        if self.is_taken:
            return
        _waiting.discard(self)
        self.is_taken, before = True, self._before
        gradients = self._gradients()
        self._stepped = next(filter(self.runtime.memory(LastStep).was_with, gradients.values()), None)
        for name, grad in gradients.items():
            old, version = (grad, None) if before is None else before.get(name, (None, None))
            if old is None:
                continue  # the loop has made it since
            is_old = grad is old and (version is None or version == local_tensor(grad)._version)
            if is_old or (grad is old and not _is_not_zero(grad)):
                param = self.runtime.parameters[name]
                self._aside[name], param.grad = grad.detach(), None
            elif name not in self._cleared and _is_not_zero(grad) and (grad is old or _is_not_zero(old)):
                raise UsageError(
                    "a gradient that was written within a window by hand, where there was one from before it",
                    why="that one is a sum over the ranks, what the window adds is not yet: nothing tells whether both are in this one",
                    fix="call optim.zero_grad() before the window, or as its first line",
                    name=name,
                )
        self._before = None

    def clear(self, ids: Collection[int]) -> None:
        """Called before ``zero_grad`` clears those of the parameters with these ``id()`` values: other numbers that are there later are
        the window's."""
        self._cleared |= {name for name in self._before or () if id(self.runtime.parameters[name]) in ids}

    def zero(self, ids: Collection[int], set_to_none: bool) -> None:
        """Does what ``zero_grad(set_to_none)`` does, to what was put aside of the parameters with these ``id()`` values."""
        kept = self._aside
        for name in [name for name in kept if id(self.runtime.parameters[name]) in ids]:
            if set_to_none:
                del kept[name]
            else:
                kept[name].zero_()

    def were_stepped(self) -> bool:
        """Whether an optimizer has stepped with one of them, and nothing has cleared or changed it since. Torch's kernels over lists of
        DTensors change no version, so its values are looked at."""
        return self._stepped is not None and _is_not_zero(self._stepped)

    def add_back(self) -> None:
        """Adds the put-aside gradients to those of the window, as one process would have accumulated them."""
        for name, grad in self._aside.items():
            add_to_gradient(self.runtime.parameters[name], grad)

    def put_back(self) -> None:
        if self.is_taken:
            for name, param in self.runtime.parameters.items():
                param.grad = self._aside.get(name)
        self.forget()

    def forget(self) -> None:
        _waiting.discard(self)
        self._aside = {}
        self._before, self.is_taken = None, False

    def _gradients(self) -> dict[str, Tensor]:
        with self.runtime.torchs_classes():
            return {name: grad for name, param in self.runtime.parameters.items() if (grad := param.grad) is not None}


def _begin(backward: Backward) -> None:
    """Before a backward: gradients of windows that wait for their first one are put aside, of models that it comes to."""
    for stash in list(_waiting):
        if not stash.has_any or _comes_to(stash.runtime, backward):
            stash.take()


def _comes_to(runtime: Runtime, backward: Backward) -> bool:
    """Whether a backward computes gradients of parameters of the model."""
    if backward.inputs or not backward.accumulates:
        # An edge of the graph may stand for a leaf.
        return not _owned(runtime).isdisjoint(
            id(getattr(getattr(x, "node", None), "variable", x)) for x in backward.inputs
        )
    path = path_of(backward.outputs, past_marks=True)
    leaves = set(map(id, path.leaves))
    if not _owned(runtime).isdisjoint(leaves):
        return True
    # A reentrant checkpoint shows no leaves: what comes through a model's output comes to the model, unless another one's show.
    others = (each for each in runtimes_in_use() if each is not runtime)
    return path.mark is not None and all(_owned(each).isdisjoint(leaves) for each in others)


def _owned(runtime: Runtime) -> set[int]:
    """The ``id()`` of each parameter, and of the copies that a forward computes with."""
    return {*map(id, runtime.parameters.values()), *(id(copy) for copy, _ in runtime.engine.gathered())}


def _is_not_zero(grad: Tensor) -> bool:
    return bool(local_tensor(grad).any())
