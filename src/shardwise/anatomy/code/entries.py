"""Which modules a forward is sure to enter, the same ones on every rank, read from the code from the root down.

Under FSDP every rank must enter the same units in the same order: an expert that one rank skips leaves the others
waiting, or (measured with experts in units of their own) gives gradients off by 0.5-2x without any error. Whether a child
may be skipped cannot be seen in the module tree, only in the code that calls it. So the code is read, conservatively: a
module counts as *surely entered* only if every call to it that was found stands where no condition that depends on
data, no early return or break and no exception can get around it. One doubtful call is enough to lose that, since a
rank would then enter it once more than another; and so is handing it to code that cannot be read.
Conditions on what is the same on every rank (``self.training``, configuration, flags, ``is None``) do not count.
"""

import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.anatomy.code.abstract import Known, Local, Value, objects_of
from shardwise.anatomy.code.frame import Frame
from shardwise.anatomy.code.objects import can_change, carries, held_by, unwrap_module
from shardwise.anatomy.code.params import Args
from shardwise.anatomy.code.source import is_torch, is_trusted, source_of

__all__ = ["Entries", "read_entries"]

_MAX_DEPTH = 24  # functions calling functions
_MAX_ROUNDS = 6  # a forward may write what an earlier part of it reads
# A function is read at each of its calls, which doubles the work for each function that calls the next one twice.
_MAX_EXPRESSIONS = (
    300_000  # some ten seconds; of the forwards of transformers that were tried, Funnel's takes most: 45 000
)


class TooLongError(Exception):
    """Reading on would take too long."""


def read_entries(root: nn.Module, blocks: Mapping[int, nn.Module]) -> "Entries":
    """Reads ``root.forward`` and what it leads to, as far as it can reach ``blocks`` (id -> module)."""
    written: dict[tuple[int, str], Any] = {}
    entries = Entries(root, blocks, {})
    for _ in range(_MAX_ROUNDS):
        entries = Entries(root, blocks, dict(written))
        try:
            entries.call(root, Args(outside=True), None)
        except TooLongError:
            entries.lose(root, "its forward calls functions in more ways than are read")
            return entries
        if entries.written.keys() == written.keys():
            return entries
        written = entries.written
    entries.lose(root, "its forward keeps changing what it reads")
    return entries


class Entries:
    """What was found, and what frames need of the whole: see :func:`read_entries`.

    Attributes:
        sure: modules entered where nothing can get around it.
        maybe: module -> why it may be skipped; wins over ``sure``.
        unread: module -> why the code that would enter it cannot be read.
        written: ``(id, attribute) -> object`` that the code sets to something ranks may differ in; id 0 = any object.
    """

    def __init__(self, root: nn.Module, blocks: Mapping[int, nn.Module], written: dict[tuple[int, str], Any]):
        self.sure: set[int] = set()
        self.maybe: dict[int, str] = {}
        self.unread: dict[int, str] = {}
        self.written = written
        self._blocks = blocks
        self._reach: dict[int, list[nn.Module]] = {}
        self._outside: set[int] = set()  # modules and parameters that also have a place outside all blocks
        self._inside: dict[int, list[nn.Module]] = {}  # module or parameter -> the blocks it is in
        self._entered: list[nn.Module] = []
        self._functions: list[types.CodeType] = []
        self.nested: list[Any] = []  # nested functions being read
        self._done: set[tuple[Any, ...]] = set()
        self._expressions = 0
        self._place(unwrap_module(root), None, set())

    def _place(self, module: nn.Module, block: nn.Module | None, seen: set[tuple[int, int]]) -> None:
        if id(module) in self._blocks:
            block = module
        elif block is not None:
            self._inside.setdefault(id(module), []).append(block)
        if (id(module), id(block)) in seen:
            return
        seen.add((id(module), id(block)))
        for param in module._parameters.values():
            if param is not None and block is not None:
                self._inside.setdefault(id(param), []).append(block)
        if block is None:
            self._outside |= {id(module), *(id(param) for param in module._parameters.values())}
        for child in module.children():
            self._place(unwrap_module(child), block, seen)

    # ---- what frames report ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Counts an expression that is read."""
        self._expressions += 1
        if self._expressions > _MAX_EXPRESSIONS:
            raise TooLongError

    def call(self, module: nn.Module, args: Args, doubt: str | None) -> None:
        """``module(...)``, through a ``__call__`` of its own if it has one."""
        module = unwrap_module(module)
        own = type(module).__call__
        if own is nn.Module.__call__:
            self.enter(module, args, doubt)
        else:
            self.follow(own, args.bound_to(Known(module)), doubt, owner=module)

    def enter(self, module: nn.Module, args: Args, doubt: str | None) -> None:
        """Notes that ``module`` is entered by way of its hooks, and reads on in its forward."""
        module = unwrap_module(module)
        self._note(module, doubt)
        if any(module is above for above in self._entered):
            self.lose(module, f"{type(module).__name__}.forward enters itself again")
            return
        key = (id(module), doubt is None, args.key())
        if not self.reach(module, without_itself=True) or key in self._done:
            return
        self._done.add(key)
        self._entered.append(module)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if carries(hook):
                self.follow(hook, Args(unknown=True), doubt, owner=module)
        self._read_forward(module, args, doubt)
        self._entered.pop()

    def _read_forward(self, module: nn.Module, args: Args, doubt: str | None) -> None:
        forward = vars(module).get("forward", types.MethodType(type(module).forward, module))  # or put on the object
        target = forward.__func__ if isinstance(forward, types.MethodType) else forward
        if source_of(target) is None:
            for block in self.reach(module):
                self.unread.setdefault(id(block), f"the source of {type(module).__name__}.forward cannot be read")
            return
        bound = args.bound_to(Known(forward.__self__)) if isinstance(forward, types.MethodType) else args
        self.follow(target, bound, doubt, owner=module)

    def touch(self, parameter: Any) -> None:
        """Notes that ``parameter`` is used by the code that is being read."""
        self._bypass(parameter)

    def follow(self, function: object, args: Args, doubt: str | None, owner: nn.Module | None) -> Value | None:
        """Reads a function that is called; gives what it returns. None where it cannot be read: then whatever it was
        given may or may not be entered."""
        if isinstance(function, types.MethodType):
            return self.follow(function.__func__, args.bound_to(Known(function.__self__)), doubt, owner)
        source = source_of(function) if owner is not None or not is_torch(function) else None
        if source is None or len(self._functions) > _MAX_DEPTH or self._functions.count(source.function.__code__) > 2:
            name = getattr(function, "__name__", type(function).__name__)
            for value in (Known(function), *args.values()):
                self.lose(value, doubt or f"it is handed to {name}(), which cannot be followed")
                if isinstance(value, Known) and not is_trusted(function):
                    self.change(value.obj)
            return None
        self._functions.append(source.function.__code__)
        try:
            return Frame(self, source, owner).run(args, doubt)
        finally:
            self._functions.pop()

    def change(self, obj: Any) -> None:
        """Notes that the code leaves something in ``obj`` that ranks may differ in."""
        if can_change(obj):
            self.written.setdefault((id(obj), "*"), obj)

    def lose(self, what: Any, why: str) -> None:
        """``what`` got into hands that may enter its modules, or not."""
        for obj in objects_of(what) if isinstance(what, Value) else (what,):
            if isinstance(obj, Local):
                obj.frame.call_local(obj, Args(unknown=True), why)
            for module in self.reach(obj):
                self.maybe.setdefault(id(module), why)

    # ---- what can be reached ---------------------------------------------------------------------------------

    def reach(self, obj: Any, without_itself: bool = False) -> list[nn.Module]:
        """The blocks that code holding ``obj`` could enter."""
        if not isinstance(obj, nn.Module):
            return [m for m in _modules_in(obj) if id(m) in self._blocks]
        if id(obj) not in self._reach:
            self._reach[id(obj)] = [m for m in _modules_in(obj) if id(m) in self._blocks]
        return [m for m in self._reach[id(obj)] if not (without_itself and m is obj)]

    def _note(self, module: nn.Module, doubt: str | None) -> None:
        if doubt is None:
            self.sure.add(id(module))
        else:
            self.maybe.setdefault(id(module), doubt)
        self._bypass(module)

    def _bypass(self, part: Any) -> None:
        """Using what is inside a block, but not by way of the block, leaves out the hooks that gather it."""
        if id(part) in self._outside:
            return
        around = self._inside.get(id(part), [])
        if around and not any(block is above for block in around for above in self._entered):
            for block in around:
                self.maybe.setdefault(id(block), "its insides are used from outside, not by calling it")


def _modules_in(obj: Any, depth: int = 3) -> list[nn.Module]:
    """Every module that can be reached from ``obj``, ``depth`` objects far."""
    if isinstance(obj, nn.Module):
        return list(obj.modules())
    if isinstance(obj, Local) or depth == 0 or not carries(obj, depth):
        return []
    held = objects_of(obj) if isinstance(obj, Value) else held_by(obj)
    found = {id(module): module for inner in held if inner is not obj for module in _modules_in(inner, depth - 1)}
    return list(found.values())
