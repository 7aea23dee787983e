"""What functions of the user's own keep, as it is now, to be put back."""

import types
from collections import deque
from collections.abc import Collection, Iterable, Sized
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.model.kept_tensors import KeptTensor, loose_tensors, restore_parts
from shardwise.model.module_state import ModuleState
from shardwise.model.mutable import ATOMS, FUNCTIONS, content_of, is_mutable, items_of
from shardwise.model.tensors import version_of

_MOST_COPIED = 64 << 20  # bytes of the tensors that functions keep
_MOST_PARTS, _LONGEST = 2000, 1000  # of what a function reaches: it may hold on to a trainer with its dataset


class FunctionState:
    """What functions of the user's own (a loss, a forward) keep: containers and objects in their closures, defaults and attributes, or of
    the object whose method they are, and modules there with their buffers; :meth:`restore` puts back what has changed. What lies in
    lists of more than a thousand items, and in globals, is not looked at."""

    def __init__(self, functions: Iterable[Any], known: Collection[int] = ()):
        modules: list[nn.Module] = []
        self._parts = [(part, content_of(part)) for part in _reached(functions, modules)]
        self._tensors: dict[int, KeptTensor] = {}
        self._large: list[tuple[Tensor, int]] = []  # with their versions: too large for a copy
        left = _MOST_COPIED
        for tensor in loose_tensors(self._parts, {}):
            left -= tensor.nbytes
            if left > 0:
                self._tensors[id(tensor)] = KeptTensor(tensor)
            else:
                self._large.append((tensor, version_of(tensor)))
        self._state = ModuleState(each for module in modules if id(module) not in known for each in module.modules())

    @property
    def lost(self) -> list[Tensor]:
        """Tensors that have changed and are not put back, as no copy of them was made."""
        return [tensor for tensor, version in self._large if version_of(tensor) != version]

    @property
    def written_buffers(self) -> list[tuple[nn.Module, str]]:
        return self._state.written_buffers

    def restore(self) -> None:
        restore_parts(self._parts, self._tensors)
        self._state.restore()


def _reached(functions: Iterable[Any], modules: list[nn.Module]) -> list[Any]:
    """The cells, containers and objects that functions use, nearest first; the modules among them are added to ``modules``."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = deque(functions)
    while waiting and len(seen) < _MOST_PARTS:
        value = waiting.popleft()
        if id(value) in seen or value.__class__ in ATOMS - FUNCTIONS:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            modules.append(value)
        elif isinstance(value, types.MethodType):
            waiting += (value.__self__, value.__func__)
        elif isinstance(value, partial):
            waiting += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.FunctionType):
            waiting += (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            waiting += vars(value).values()
        elif isinstance(value, tuple | frozenset):
            waiting += value
        elif is_mutable(value) and not (isinstance(value, Sized) and len(value) > _LONGEST):
            found[id(value)] = value
            waiting += items_of(content_of(value))
    return list(found.values())
