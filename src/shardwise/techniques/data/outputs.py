"""Marks the outputs of a replicated model in the graph, so that it is known before a backward runs whether it comes through the model.

One that reaches parameters and nothing that the model has computed is a penalty on weights: the same on every rank, so that a sum over
the ranks would count it once for each.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import mark_output
from shardwise._torch.modules import PausableHooks
from shardwise.model.pytrees import map_leaves, tensors_within

_NUMBERS = itertools.count()
_compiled_whole: set[str] = set()  # of models


class OutputMarks:
    """Marks the outputs of ``module`` and its parts: inside its forward those from which losses are taken, otherwise those of
    each part that is called by itself.

    While the module's forward runs, the other parts have no hook: a module with hooks takes torch's slow path, which for hundreds of
    small layers is a percent of a step. In the windows of a ``TrainStep`` the parts have none at all, once a window has shown that
    its loss runs no backward of its own.
    """

    def __init__(self, module: nn.Module):
        self._name = str(next(_NUMBERS))  # a text: torch.compile may take a number for one that changes
        self._running: list[nn.Module] = []
        self._large = set(map(id, _parts(module)))  # those from which losses are taken
        self._are_off = False
        module.register_forward_pre_hook(_Hook(self._before_model, name=self._name))
        parts = {
            part: part.register_forward_hook(_Hook(self._after_part)) for part in module.modules() if part is not module
        }
        self._of_small = PausableHooks([handle for part, handle in parts.items() if id(part) not in self._large])
        self._of_large = PausableHooks([handle for part, handle in parts.items() if id(part) in self._large])
        module.register_forward_hook(_Hook(self._after_model), always_call=True)

    @property
    def are_hidden(self) -> bool:
        """Whether ``torch.compile`` has compiled the model as a whole, or what calls it: its graph has no marks."""
        return self._name in _compiled_whole

    def begin(self, *, of_parts: bool) -> None:
        """Called when a window begins. ``of_parts``: whether parts are marked in it too."""
        self._running.clear()  # after a KeyboardInterrupt torch calls no hook of a forward's end
        self._are_off = not of_parts
        for hooks in (self._of_small, self._of_large):
            (hooks.resume if of_parts else hooks.pause)()

    def _before_model(self, module: nn.Module, _args: Any) -> None:
        if not self._running:
            self._of_small.pause()
        self._running.append(module)

    def _after_part(self, module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and (not self._running or id(module) in self._large):
            self._mark_all(output)

    def _after_model(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._running.clear()
        if not self._are_off:
            self._of_small.resume()
        if torch.is_grad_enabled():
            self._mark_all(output)

    def _mark_all(self, output: Any) -> None:
        if isinstance(output, Tensor):
            self._mark_one(output)
            return
        map_leaves(self._mark_one, output)
        for tensor in tensors_within(output)[0]:
            self._mark_one(tensor)

    def _mark_one(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            mark_output(leaf, True)
        return leaf


class _Hook:
    """A hook that calls a method, as long as its object is there, outside of what is compiled. A copy of it, as in a part of the model that
    is pickled, does nothing."""

    def __init__(self, method: Any = None, *, name: str = ""):
        self._method = None if method is None else weakref.WeakMethod(method)
        self._name = name

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            _note_compiled(self._name)
            return
        method = None if self._method is None else self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


@torch.compiler.assume_constant_result
def _note_compiled(name: str) -> int:
    """Called while torch.compile reads the hooks, and not again when the graph runs."""
    _compiled_whole.add(name)
    return 0


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
