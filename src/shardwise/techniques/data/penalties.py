"""Gradients of a backward that reaches parameters but no output of the model, as a weight penalty's own backward does.

Such a term is the same on every rank and counts once, as in one process; a sum over the ranks would count it once per
rank. For a sharded parameter each rank adds the gradient to its own shard, and nothing is summed. For full parameters
these gradients are kept apart from those that are summed, and compared: if they are equal on all ranks they count once;
otherwise they come from data (a head that is used as a plain matrix), and are summed like any others.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise._torch.modules import PausableHooks
from shardwise.errors import UnsupportedError, UsageError
from shardwise.model.pytrees import map_leaves, tensors_within
from shardwise.techniques.data.gradients import EndOfBackward

__all__ = ["PenaltyGradients", "add_to_part", "tolerance"]

_NUMBERS = itertools.count()
_compiled_whole: set[int] = set()  # the numbers of models that torch.compile has compiled with their hooks


class PenaltyGradients:
    """Keeps such gradients of ``params`` apart, on this rank.

    Args:
        params: unsharded parameters, by number.
        ended: called when a backward has ended, with the gradients (by number) that were held back and belong to those
            that are summed, because it did reach the model; and whether any were kept apart.

    A backward shows that it has reached the model by hooks on what the model computed. In a window of a ``TrainStep`` they are
    off, as they take time where blocks are small, once a window has shown that all backwards there are the step's own: those of
    sums of losses, which are summed over the ranks whatever they reach. With several such steps for one model they stay on.

    Attributes:
        has_reached: whether the running backward has reached something that the model computed.
        are_off: whether the hooks are off now that show it.
        past: the positions passed to :meth:`note` in a backward that reached the model too, when ``ended`` is called.
    """

    def __init__(self, params: Sequence[nn.Parameter], ended: Callable[[dict[int, Tensor], bool], None]):
        self.params = params
        self.past: list[int] = []
        self.parts: dict[frozenset[int], dict[int, Tensor]] = {}  # of ended backwards, by the parameters each reached
        self._ended = ended
        self._of_this: dict[int, Tensor] = {}  # of the running backward
        self._before: dict[int, Tensor | None] = {}  # gradients from before, while one is accumulated
        self.has_reached = False
        self._has_added = False  # the running backward has reached parameters
        self._is_differentiated = False  # one with create_graph ran: the next may reach parameters through its graph
        self._ending = EndOfBackward()
        self._number = -1  # of the watched model
        self._hooks: list[PausableHooks] = []  # on all parts of the model, but for the model itself
        self._is_own = False  # the running backward is that of a TrainStep
        self._in_step = self.are_off = False  # a window of a TrainStep runs; without those hooks
        # In such windows there were no other backwards; None: there was no such window.
        self._only_own: bool | None = None
        self._steps: weakref.WeakSet[Any] = weakref.WeakSet()
        # Called between windows: after a KeyboardInterrupt in a forward torch calls no hook of its end.
        self.end_interrupted: Callable[[], None] = lambda: None

    def watch(self, module: nn.Module) -> None:
        """Registers hooks on the outputs of ``module`` and its parts, which show that a backward has reached the model:
        inside its forward those from which losses are taken, otherwise those of each part that is called by itself.

        While the module's forward runs, the other parts have no such hook: a module with hooks takes torch's slow path, which
        for hundreds of small layers is a percent of a step."""
        penalties = weakref.ref(self)  # hooks live in C++, where a cycle through them is never freed
        larger = set(map(id, _parts(module)))
        running: list[nn.Module] = []
        self._number = number = next(_NUMBERS)

        def reached(_grad: Tensor) -> None:
            found = penalties()
            if found is not None:
                found.reach()

        def before(called: nn.Module, _args: Any) -> None:
            if torch.compiler.is_compiling():
                _note_compiled(number)
            elif not running and not are_off():
                small.pause()
            running.append(called)

        def end(_called: nn.Module, _args: Any, _output: Any) -> None:
            running.clear()
            if not torch.compiler.is_compiling() and not are_off():
                small.resume()

        def after(called: nn.Module, _args: Any, output: Any) -> None:
            # The output of a compiled part is hooked outside of it.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling() and (not running or id(called) in larger):
                _hook(output, reached)

        module.register_forward_pre_hook(before)
        handles = {part: part.register_forward_hook(after) for part in module.modules()}
        handles.pop(module)
        small = PausableHooks([handle for part, handle in handles.items() if id(part) not in larger])
        large = PausableHooks([handle for part, handle in handles.items() if id(part) in larger])
        module.register_forward_hook(end, always_call=True)

        def are_off() -> bool:
            found = penalties()
            return found is not None and found.are_off

        def end_interrupted() -> None:
            if running:
                running.clear()
                if not are_off():
                    small.resume()

        self._hooks, self.end_interrupted = [small, large], end_interrupted

    def add_step(self, step: Any) -> None:
        """Called when a ``TrainStep`` of the model is made: its loss may run other backwards than another one's."""
        self._steps.add(step)
        self._only_own = None

    def begin_step(self) -> None:
        """Called when a window of a ``TrainStep`` begins."""
        self.end_step()
        self._in_step = True
        if self._only_own and len(self._steps) == 1 and self._number not in _compiled_whole:
            self.are_off = True
            for hooks in self._hooks:
                hooks.pause()

    def end_step(self) -> None:
        """Called when a window has ended, in whichever way."""
        if self.are_off:
            for hooks in self._hooks:
                hooks.resume()
        self._in_step = self.are_off = False

    @contextlib.contextmanager
    def own_backward(self) -> Iterator[None]:
        """Context manager: the backward is that of a ``TrainStep``."""
        self._is_own = self.has_reached = True
        try:
            yield
        finally:
            self._is_own = self.has_reached = False

    def reach(self) -> None:
        """Called when the running backward has reached something that the model computed."""
        self._begin()
        self.has_reached = True
        self._is_differentiated = self._is_differentiated or torch.is_grad_enabled()  # with create_graph=True

    def note(self, position: int) -> None:
        """Called when a gradient has reached a sharded parameter, and not through its unit."""
        self._begin()
        self.past.append(position)

    def before(self, i: int) -> bool:
        """Called before a gradient is accumulated into parameter ``i``. Returns whether it is kept apart, at least
        until backward ends."""
        self._begin()
        self._has_added = True
        if self.has_reached or self._is_differentiated:
            return False
        if self.are_off:
            self._refuse_unseen()
        param = self.params[i]
        self._before[i], param.grad = param.grad, None
        return True

    def begun_unseen(self) -> None:
        """Called after the first gradient of a backward was accumulated, where :meth:`before` was not called. Raises an error if it
        would have been kept apart."""
        self._begin()
        self._has_added = True
        if self.has_reached or self._is_differentiated:
            return
        if self.are_off:
            self._refuse_unseen()
        raise UsageError(
            "a backward of a weight penalty, in a window, right after a backward that raised",
            why="its gradients, which count once, cannot be told from those that are summed over the ranks",
            fix="leave the window when a backward raises, or run the model's own backward first",
        )

    def _refuse_unseen(self) -> NoReturn:
        raise UnsupportedError(
            "a backward inside of TrainStep's loss or forward, of a part of the model or of a weight penalty, where earlier steps had none",
            why="nothing shows which of the two it is: its gradients are summed over the ranks, or count once",
            fix="add the term to the sum that the loss returns, or run that backward from the first step on",
        )

    def after(self, i: int) -> bool:
        """Called after it was accumulated. Returns whether it is kept apart."""
        if i not in self._before:
            return False
        param, before = self.params[i], self._before.pop(i)
        add_to_part(self._of_this, i, param.grad)
        param.grad = before
        return True

    def refuse_doubt(self) -> None:
        """Called where such gradients are equal on all ranks. Raises UnsupportedError if the model was compiled as a whole."""
        if self._number in _compiled_whole:
            raise UnsupportedError(
                "a model that torch.compile compiled as a whole, with replicas, and gradients that are equal on all ranks",
                why="the graph hides whether backward came through the model, on data that is the same on every rank, or is that of a "
                "weight penalty, which counts once and not once for each rank",
                fix='compile it by parallelize(..., compile="blocks"), or its blocks by themselves: block.compile()',
            )

    def take(self) -> dict[frozenset[int], dict[int, Tensor]]:
        """Returns and forgets what was kept apart: for each set of parameters that backwards reached, the sums of their
        gradients. One parameter's gradient (a bias's) may be equal on all ranks by chance, so those of one backward are
        judged together."""
        self._begin_anew()
        parts, self.parts = self.parts, {}
        return parts

    def _begin(self) -> None:
        if not self._ending.is_due:
            self._begin_anew()
            self._ending.call(self._end)
            if self._in_step:
                self._only_own = self._is_own and self._only_own is not False

    def _begin_anew(self) -> None:
        """Forgets a backward that raised."""
        if self._ending.is_due:
            return
        for i, grad in self._before.items():
            self.params[i].grad = grad
        self._before, self._of_this, self.past = {}, {}, []
        self._ending.forget()
        self.has_reached, self._has_added = self._is_own, False

    def _end(self) -> None:
        parts, has_reached = self._of_this, self.has_reached
        self._is_differentiated = self._is_differentiated and not self._has_added
        self._ending.forget()
        # A backward inside of the step's own one (a reentrant checkpoint) may end before it.
        self._of_this, self.has_reached, self._has_added = {}, self._is_own, False
        if parts and not has_reached:
            kept = self.parts.setdefault(frozenset(parts), {})
            for i, part in parts.items():
                add_to_part(kept, i, part)
        self.past = self.past if has_reached else []
        self._ended(parts if has_reached else {}, bool(parts) and not has_reached)


@torch.compiler.assume_constant_result
def _note_compiled(number: int) -> int:
    """Called while torch.compile reads the hooks of a whole model, and not again when the graph runs."""
    _compiled_whole.add(number)
    return 0


def tolerance(dtype: torch.dtype) -> float:
    """Relative tolerance, since ranks may compute the same term on different processors. At least what a variance in
    float64 can resolve."""
    return max(torch.finfo(dtype).eps ** 0.5, 1e-6)


def add_to_part(parts: dict[int, Tensor], i: int, part: Tensor | None) -> None:
    if part is not None:
        parts[i] = parts[i] + part if i in parts else part


def _parts(module: nn.Module) -> list[nn.Module]:
    """``module`` and the parts of it from which losses are taken: list entries, and modules next to and above lists."""
    found = [module]
    if any(isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) for child in module.modules()):
        for child in module.children():
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            found += [*child] if isinstance(child, nn.ModuleList | nn.Sequential) else []
            found += child.values() if isinstance(child, nn.ModuleDict) else []
            found += [] if is_list else _parts(child)
    else:
        found += module.children()
    return found


def _hook(output: Any, reached: Callable[[Tensor], None]) -> None:
    def each(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(reached)
        return leaf

    if isinstance(output, Tensor):
        each(output)
        return
    map_leaves(each, output)
    for tensor in tensors_within(output)[0]:
        each(tensor)
