"""Runs of a module that leave nothing outside of it, such as a table in a class, a list among the globals, or what
``functools.lru_cache`` keeps.

Training would go on with what a run to find something out has left, on one rank; and the next such run would compute with it.
Seen is what functions name, when they run for the first time and before they do, and what is reached from there.
"""

import contextlib
import contextvars
import dis
import functools
import gc
import logging
import os
import sys
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from typing import Any

from torch import Tensor, nn

from shardwise.config.caller import level_of_caller
from shardwise.model.loggers import NAME as LOGGED
from shardwise.model.loggers import LoggerState, NewLoggers, loggers, names_loggers, within_logger
from shardwise.model.module_state import Attributes, ModuleState
from shardwise.model.mutable import changed_values, content_of, put
from shardwise.model.names import canonical_modules, own_attributes
from shardwise.model.places import LONGEST, Environment, Key, Place, Space, is_cache, is_opaque, is_place, moves_on
from shardwise.model.side_effects import Watch
from shardwise.model.tensors import same_bytes

_ABSENT = object()
_MOST = 200_000  # values that are looked at, the nearest ones first: a script may hold all of its data
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), range, slice})
_MOST_COPIED = 64 << 20  # bytes of tensors of which copies are kept
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_STORE_BY_TEXT = frozenset({"setattr", "delattr", "globals", "vars", "__dict__"})
_BY_TEXT = _STORE_BY_TEXT | {"getattr"}
_STORES = {dis.opmap[f"{what}_{where}"] for what in ("STORE", "DELETE") for where in ("ATTR", "GLOBAL", "DEREF")}


class Isolated:
    """A function that runs a module, and the places outside of modules that it may write: :meth:`restore` puts back what they held.
    A context variable needs no place: code runs in a copy of the context. What cannot be put back, such as a file, is refused.

    Args:
        module: whose classes, hooks and functions are looked into.
        call: ``call(copy)`` runs the module, or a copy of it.
    """

    def __init__(self, module: nn.Module, call: Callable[[nn.Module], Any]):
        self._call, self._watch = call, Watch()
        self._variables: list[Any] = []  # values that the last call has set
        self._own = weakref.WeakSet(module.modules())  # and those of its copies, which look after themselves
        self._known: dict[int, Any] = {}  # by id, and alive, so that no id is another's later
        self._keys: set[Key] = set()
        self._spaces: dict[int, Any] = {}  # by id
        self._codes: set[int] = set()  # by id, of functions that are known
        self._inner: set[int] = set()  # of functions that those make when they run
        self._noted: set[Hashable] = set()
        self._places: list[Place] = []
        self._changed: list[Place] | None = None  # by the last call; None: not looked for
        self._plain: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # attributes of functions that have none
        # Of which some have changed, as places have.
        self._marked: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._modules: list[ModuleState | Attributes] = []
        self._tensors: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._left = _MOST_COPIED
        self._waiting = deque[tuple[str, Any]]([("forward", call)])
        for name, child in canonical_modules(module):
            self._waiting.append((type(child).__name__, type(child)))
            for kind in type(child).__mro__:
                if is_opaque(kind.__module__) and issubclass(kind, nn.Module):
                    self._note_space(f"{kind.__module__}.{kind.__qualname__}", kind)
            hooks = [hook for kind in _HOOKS for hook in getattr(child, kind).values()]
            self._waiting += [(f"{name}.{type(child).__name__}", value) for value in hooks]
            self._waiting += [(f"{name}.{key}", x) for key, x in own_attributes(child).items() if callable(x)]
        self._walk()

    def __call__(self, module: nn.Module) -> Any:
        if module not in self._own:
            self._own.update(module.modules())
        context = contextvars.copy_context()
        before = dict(context)
        with self._watch.running(module):
            result = context.run(self._call, module)
        self._variables = [value for key, value in context.items() if before.get(key, _ABSENT) is not value]
        return result

    @contextlib.contextmanager
    def noting(self, what: Hashable) -> Iterator[None]:
        """Within: places are looked up of each function that runs for the first time. ``what``: runs; it is looked at once."""
        if what in self._noted:
            yield
            return
        self._noted.add(what)
        before, of_threads = sys.getprofile(), threading.getprofile()
        sys.setprofile(self._entered)
        threading.setprofile(self._entered_in_thread)  # of those that begin within
        try:
            yield
        finally:
            threading.setprofile(of_threads)  # type: ignore[arg-type]
            sys.setprofile(before if callable(before) else None)
            if hasattr(before, "enable"):  # a profile of cProfile, which is no function
                before.enable()

    def kept(self) -> list[tuple[str, Any]]:
        """What is in places and was not there before, with the name of its place."""
        self._changed = [place for place in self._places if not place.is_same]
        found = [
            (place.name, value)
            for place in self._changed
            for value in place.new_values
            if not (place.name.startswith(LOGGED) and isinstance(value, str | bytes))  # with the time of day, perhaps
        ]
        self._marked = [(name, now, was) for name, now, was in self._plain if len(now) != len(was)]
        found += [(name, x) for name, now, was in self._marked for x in changed_values(now, was)]
        own = [value for state in self._modules if isinstance(state, Attributes) for value in state.changed()]
        return [
            *found,
            *(("a module outside of the model", value) for value in own),
            *(("a context variable", value) for value in self._variables),
        ]

    def restore(self) -> None:
        """Puts back what has changed. May be called again.

        Raises:
            UnsupportedError: a generator, or another iterator, has moved on; the run would have written a file, or the like.
        """
        if self._changed is None:
            self.kept()
        changed, self._changed = self._changed or [], None
        with contextlib.ExitStack() as stack:  # all of them, whichever raises
            stack.callback(self._watch.check)
            for each in (*changed, *self._modules):
                stack.callback(each.restore)
            for _, now, was in self._marked:
                put(now, was)
            written = [
                each
                for each in self._tensors
                if each[1]._version != each[2] or (each[3] is not None and not same_bytes(each[1], each[3]))  # by .data
            ]
            for _, tensor, _, value in written:
                if value is not None:
                    tensor.detach().copy_(value)
            if name := next((name for name, *_, value in written if value is None), ""):
                raise moves_on(name, "a large tensor")

    # ---- where ------------------------------------------------------------------------------------------------------

    def _entered(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or id(frame.f_code) in self._known:
            return
        sys.setprofile(None)  # not of what looks
        try:
            if self._watch.is_writer(frame):
                self._watch.writes(frame)
                return  # it is not known: the next call may have another file
            if _is_being_imported(frame.f_globals):
                return
            self._known[id(frame.f_code)] = frame.f_code
            if not is_opaque(frame.f_globals.get("__name__")):
                self._look(frame)
        finally:
            sys.setprofile(self._entered)

    def _entered_in_thread(self, frame: types.FrameType, event: str, _: Any) -> None:
        self._watch.add_thread()
        sys.setprofile(self._entered)

    def _look(self, frame: types.FrameType) -> None:
        """Notes what the code of a frame names, and the names that it gives other values."""
        code, home = frame.f_code, frame.f_globals
        names, stored = set(code.co_names), _names_stored(code)
        if names & _BY_TEXT:
            if names & _STORE_BY_TEXT:
                self._note_space(f"{home.get('__name__')}", home)
            names |= (texts := {text for text in code.co_consts if isinstance(text, str)})
            stored |= texts
        self._note_names(stored, home)
        spaces, seen = [home, *(vars(sys.modules[name]) for name in names if name in sys.modules)], set[int]()
        while spaces:
            space = spaces.pop()
            seen.add(id(space))
            for name in names:
                if isinstance(value := space.get(name), types.ModuleType):
                    if id(vars(value)) not in seen:
                        spaces.append(vars(value))
                else:
                    self._watch.named(frame, value)
                    self._waiting.append((f"{space.get('__name__')}.{name}", value))
                    if stored and isinstance(value, type | types.FunctionType) and is_opaque(value.__module__):
                        self._note_space(f"{space.get('__name__')}.{name}", value)
            if space is not home and not _is_being_imported(space):
                self._note_names(stored, space)
                if names & _STORE_BY_TEXT and not is_opaque(space.get("__name__")):
                    self._note_space(f"{space.get('__name__')}", space)
        # A function that another one has made while it ran is gone with that.
        self._inner |= {id(each) for each in code.co_consts if isinstance(each, types.CodeType)}
        if code.co_freevars and id(code) not in self._codes | self._inner:
            functions = [f for f in gc.get_referrers(code) if isinstance(f, types.FunctionType)]
            self._waiting += [(f.__qualname__, f) for f in functions]
        self._walk()

    def _note_names(self, names: Set[str], space: dict[str, Any]) -> None:
        """Notes what names stand for, or that they stand for nothing."""
        for name in names:
            key = Key(space, name)
            if key not in self._keys:
                self._keys.add(key)
                self._note(f"{space.get('__name__')}.{name}", key)

    def _note_space(self, name: str, home: Any) -> None:
        """Notes all names of a module, or attributes of a class or function of torch."""
        if id(home) not in self._spaces:
            self._spaces[id(home)] = home
            self._note(name, Space(home))

    def _walk(self) -> None:
        while self._waiting:
            name, value = self._waiting.popleft()
            if len(self._known) > _MOST:
                self._waiting.clear()
                warnings.warn(
                    f"{name}: a forward names so much outside of the model that only the {_MOST:,} nearest values are looked at. What it keeps in "
                    "others for its next call is not put back after the runs that look for layers to cut: keep it in attributes of a module",
                    stacklevel=level_of_caller(),
                )
            elif value.__class__ not in _ATOMS and id(value) not in self._known:
                self._known[id(value)] = value
                self._waiting += self._visit(name, value)

    def _visit(self, name: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Notes a value that is a place; returns what is in it."""
        if isinstance(value, Tensor):
            self._note_tensor(name, value)
            return ()
        if isinstance(value, nn.Module):
            others = [child for child in value.modules() if child not in self._own]
            self._own.update(others)
            self._modules += [ModuleState(others), *(Attributes(child) for child in others)]
            return [(type(value).__name__, type(value))]
        if value is os.environ:
            self._note(name, Environment())
            return ()
        if isinstance(value, logging.Logger | logging.Handler):
            self._note(name, LoggerState(value))
            return [*within_logger(value), (type(value).__name__, type(value))]
        if names_loggers(value):
            if id(logging.root.manager) not in self._known:
                self._known[id(logging.root.manager)] = logging.root.manager
                self._note("loggers", NewLoggers())
            return loggers()
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, types.FunctionType):
            return self._of_function(name, value)
        if is_cache(value):
            self._note(name, value)
            return [(name, value.__wrapped__)]
        if isinstance(value, tuple | frozenset):
            return [(name, item) for item in value]
        if (inner := _within(value)) is not None:
            return [(name, item) for item in inner]
        if not is_place(value):
            return ()
        content = self._note(name, value)
        found = [(f"{name}.{key}" if isinstance(key, str) else name, item) for key, item in _items(content)]
        return found if is_opaque(type(value).__module__) else [*found, (type(value).__name__, type(value))]

    def _of_class(self, kind: type) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for cls in (*kind.__mro__, type(kind)):
            if not is_opaque(cls.__module__) and (cls is kind or id(cls) not in self._known):
                self._known[id(cls)] = cls
                self._note(f"{cls.__module__}.{cls.__qualname__}", cls)
                found += [
                    (f"{cls.__qualname__}.{key}", item)
                    for key, item in vars(cls).items()
                    if key[:2] != "__" or callable(item)
                ]
        return found

    def _of_function(self, name: str, function: types.FunctionType) -> list[tuple[str, Any]]:
        cells = function.__closure__ or ()
        inner = [value for cell in cells for value in content_of(cell)]
        if is_opaque(function.__module__):
            # Those of a singledispatch hold what is registered.
            return [(name, value) for value in inner if callable(value) or function.__module__ == "functools"]
        code = function.__code__
        self._codes.add(id(code))
        stored = _names_stored(code) if cells else ()
        for key, cell in zip(code.co_freevars, cells, strict=False):
            if key in stored:
                self._note(f"{name}.{key}", cell)
        if vars(function).keys() <= {"__wrapped__"}:
            self._plain.append((name, vars(function), dict(vars(function))))
        else:
            self._note(name, vars(function))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values())
        return [(name, value) for value in (*inner, *defaults)]

    def _note(self, name: str, part: Any) -> Any:
        """Notes a place; returns what it holds."""
        self._places.append(place := Place(name, part))
        return place.content

    def _note_tensor(self, name: str, tensor: Tensor) -> None:
        if type(tensor) in (Tensor, nn.Parameter) and not (tensor.is_meta or tensor.is_inference()):
            value = tensor.detach().clone() if tensor.nbytes <= self._left else None
            self._left -= 0 if value is None else tensor.nbytes
            self._tensors.append((name, tensor, tensor._version, value))


def _is_being_imported(space: dict[str, Any]) -> bool:
    """Whether a module is imported now, for the first time, and stays."""
    return getattr(space.get("__spec__"), "_initializing", False)


def _items(content: Any) -> Iterable[tuple[Any, Any]]:
    """What is in a place, with its key or number: not of a long one."""
    if not isinstance(content, dict | list | set) or len(content) > LONGEST:
        return ()
    return content.items() if isinstance(content, dict) else enumerate(content)


@functools.lru_cache(maxsize=1 << 12)
def _names_stored(code: types.CodeType) -> frozenset[str]:
    """The globals, attributes and variables of functions that code gives other values."""
    if _STORES.isdisjoint(code.co_code[::2]):
        return frozenset()
    return frozenset(str(each.argval) for each in dis.get_instructions(code) if each.opcode in _STORES)


def _within(value: Any) -> list[Any] | None:
    """What descriptors and the like hold, which are no places themselves; None of another value."""
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return None
