"""What a forward writes into modules besides its results: buffers, and the plain Python state beside them.

A cache is a tensor in a buffer and a number in an attribute that says how much of it is filled. Where a forward must not
count, both go back together: one without the other would be read wrong from then on.
"""

import operator
import sys
import sysconfig
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sized
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import unseen
from shardwise.model.iterators import Iteration, is_iterator
from shardwise.model.names import own_attributes
from shardwise.model.tensors import bytes_of, same_bytes, version_of, write_values

REPLACES = "_shardwise_replaces"
"""Attribute of a function that a technique has put in the place of a module's ``forward``: it is no state of the module."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_DEPTH = 32  # containers within containers that are looked into, each once
_MOST_COPIED = 64 << 20  # bytes of the tensors that functions keep
_MOST_PARTS, _LONGEST = 2000, 1000  # of what a function reaches: it may hold on to a trainer with its dataset
_OPAQUE = frozenset({"torch", "shardwise", "builtins"})
_PLAIN = frozenset(
    {"argparse", "collections", "queue"}
)  # Python's classes that hold a user's values: Namespace, UserDict, Queue
_STDLIB = sysconfig.get_path("stdlib")


class ModuleState:
    """Buffers of modules as they are now, with the Python state of the modules; :meth:`restore` puts back what has changed.

    Python state goes back for all modules, with tensors that are not registered. Modules of torch have none beside their buffers, and are
    looked at only if they have buffers.

    Args:
        modules: those that a forward may write. Those that they hold without having registered them, as in a list, are added.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._values: dict[int, _Value] = {}  # by id, so that a buffer with two names stays one tensor
        self._owners: list[_Owner] = []
        self._modules: dict[int, nn.Module] = {}
        waiting = deque(modules)
        while waiting:
            module = waiting.popleft()
            if id(module) in self._modules:
                continue
            self._modules[id(module)] = module
            if module._buffers or keeps_attributes(module):
                self._add(owner := _Owner(module))
                held = owner.attributes.modules if owner.attributes is not None else ()
                waiting += (each for one in held for each in one.modules())

    def _add(self, owner: "_Owner") -> None:
        self._owners.append(owner)
        for buffer in owner.buffers.values():
            if buffer is not None and id(buffer) not in self._values:
                self._values[id(buffer)] = _Value(buffer, of_torch=not keeps_attributes(owner.module))

    @property
    def written_buffers(self) -> list[tuple[nn.Module, str]]:
        """The buffers that have changed, each with its module."""
        with unseen():
            changed = _changed(self._values)
        return [
            (owner.module, name)
            for owner in self._owners
            for name, buffer in owner.module._buffers.items()
            if buffer is not owner.buffers.get(name) or id(buffer) in changed
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the buffers (the same objects, with their values) that have changed, and the Python state of their
        modules. May be called again. On a device it reads nothing for layers of torch: their buffers are written in any case.

        Raises:
            UnsupportedError: what Python state cannot be put back; see :meth:`Attributes.restore`.
        """
        with unseen():  # what only compares is no use of a buffer
            changed = _changed(self._values)
        for owner in self._owners:
            owner.restore()
        for key in changed:
            self._values[key].restore()


class _Owner:
    """A module, and what it held."""

    def __init__(self, module: nn.Module):
        self.module, self.buffers = module, dict(module._buffers)
        self._computed = set(module._non_persistent_buffers_set)
        self.attributes = Attributes(module, all_tensors=True) if keeps_attributes(module) else None

    def restore(self) -> None:
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self._computed)
        if self.attributes is not None:
            self.attributes.restore()


class _Value:
    """A tensor, and the value it had. ``of_torch``: a layer of torch has it, which keeps nothing beside it."""

    def __init__(self, tensor: Tensor, *, of_torch: bool = False):
        self.tensor, self.of_torch = tensor, of_torch
        self._version, self.value = version_of(tensor), tensor.detach().clone()

    @property
    def shows_change(self) -> bool:
        """Whether the tensor was written, as far as that shows without a look at its values."""
        now = self.tensor
        return version_of(now) != self._version or now.shape != self.value.shape or now.dtype != self.value.dtype

    def restore(self) -> None:
        write_values(self.tensor, self.value)
        self._version = version_of(self.tensor)


def _changed(values: dict[int, _Value]) -> set[int]:
    """Keys of the tensors that were written. Batch norm's kernels, and writes to ``.data``, do not change a version. Those on a device
    are read together."""
    found = {key for key, value in values.items() if value.shows_change}
    away: list[int] = []
    for key, value in values.items():
        if key in found or value.tensor.is_meta:
            continue
        if value.tensor.is_cpu:
            if not same_bytes(value.tensor, value.value):
                found.add(key)
        elif value.of_torch:
            found.add(key)
        else:
            away.append(key)
    for device in {values[key].tensor.device for key in away}:
        keys = [key for key in away if values[key].tensor.device == device]
        flags = torch.stack([(bytes_of(values[key].tensor) != bytes_of(values[key].value)).any() for key in keys])
        found |= {key for key, flag in zip(keys, flags.tolist(), strict=True) if flag}
    return found


class Attributes:
    """The plain Python state of a module: its own attributes, and what is in lists, dicts, sets, arrays, iterators, and objects of the
    user's classes there. Tensors there are kept with their values if the module has buffers, or with ``all_tensors``.

    Args:
        known: parts that others keep, by id, which are left to them, as a config that all modules have; this one's are added.

    Attributes:
        modules: that it holds there.
    """

    def __init__(self, module: nn.Module, *, all_tensors: bool = False, known: dict[int, Any] | None = None):
        self.module, self._attributes, self._all = module, _own(module), dict(vars(module))
        self.modules: list[nn.Module] = []
        iterators: dict[int, Any] = {}
        parts = _mutable_parts(self._attributes.values(), self.modules, iterators, {} if known is None else known)
        self._parts = [(part, content_of(part)) for part in parts]
        tensors = _loose(self._parts, self._attributes) if module._buffers or all_tensors else ()
        self._tensors = {id(tensor): _Value(tensor) for tensor in tensors}
        self._iterators = {key: Iteration(iterator) for key, iterator in iterators.items()}
        self._is_plain = all(value.__class__ in _ATOMS for value in self._attributes.values())

    def are_same(self) -> bool:
        """Whether nothing has changed, as far as that is known from the attributes alone: they hold numbers and texts only, as most
        do. It takes a tenth of a new look."""
        now, was = vars(self.module), self._all
        return self._is_plain and now.keys() == was.keys() and all(map(operator.is_, now.values(), was.values()))

    @property
    def may_have_changed(self) -> bool:
        """Whether anything has changed; also where it holds an iterator that may have run, which most do not show."""
        if self.are_same():
            return False
        parts = [(_own(self.module), self._attributes), *((content_of(part), was) for part, was in self._parts)]
        if not all(is_same(now, was) for now, was in parts):
            return True
        with unseen():
            return bool(_changed(self._tensors)) or any(each.may_have_run for each in self._iterators.values())

    def changed(self) -> list[Any]:
        """The values that are new, in the attributes or in what these hold."""
        if self.are_same():
            return []
        found = changed_values(_own(self.module), self._attributes)
        return found + [value for part, was in self._parts for value in changed_values(content_of(part), was)]

    def restore(self) -> None:
        """Puts back what has changed. Iterators are replaced by others at the same place.

        Raises:
            UnsupportedError: a generator, or another iterator that cannot be copied, has run, or may have.
        """
        if self.are_same():
            return
        for name in _own(self.module).keys() - self._attributes.keys():
            del self.module.__dict__[name]
        parts, attributes = self._parts, self._attributes
        if self._iterators:
            again = {key: iteration.again(self.module) for key, iteration in self._iterators.items()}
            attributes = _with(attributes, again)
            parts = [(part, _with(content, again)) for part, content in parts]
        self.module.__dict__.update(attributes)
        _restore(parts, self._tensors)


def _with(content: Any, again: dict[int, Any]) -> Any:
    """The content of a part with other iterators in it."""
    if isinstance(content, dict):
        return {key: again.get(id(value), value) for key, value in content.items()}
    return [again.get(id(value), value) for value in content] if isinstance(content, list) else content


def _restore(parts: Iterable[tuple[Any, Any]], tensors: dict[int, _Value]) -> None:
    for part, content in parts:
        if not is_same(content_of(part), content):
            put(part, content)
    with unseen():
        changed = _changed(tensors)
    for key in changed:
        tensors[key].restore()


class TensorAttributes:
    """The attributes that a user's code has given the tensors of modules; :meth:`restore` puts back what has changed."""

    def __init__(self, modules: Iterable[nn.Module]):
        held = {id(x): x for module in modules for x in (*module._parameters.values(), *module._buffers.values())}
        self._tensors = [(x, dict(vars(x))) for x in held.values() if x is not None]

    def changed(self) -> list[Any]:
        """The values that are new."""
        return [value for x, was in self._tensors for value in changed_values(vars(x), was)]

    def restore(self) -> None:
        for x, was in self._tensors:
            if not is_same(vars(x), was):
                put(vars(x), was)


class HookState:
    """The hooks of modules; :meth:`restore` removes those that a forward has added, and adds those that it has removed."""

    def __init__(self, modules: Iterable[nn.Module]):
        held = [module.__dict__[kind] for module in modules for kind in _HOOKS]
        self._used = [(hooks, dict(hooks)) for hooks in held if hooks]
        self._empty = [hooks for hooks in held if not hooks]

    def restore(self) -> None:
        for hooks in filter(None, self._empty):
            hooks.clear()
        for hooks, before in self._used:
            if hooks.keys() != before.keys():
                put(hooks, before)


class FunctionState:
    """What functions of the user's own (a loss, a forward) keep: containers and objects in their closures, defaults and attributes, or of
    the object whose method they are, and modules there with their buffers; :meth:`restore` puts back what has changed. What lies in
    lists of more than a thousand items, and in globals, is not looked at.

    Args:
        functions: the functions.
        known: ids of modules that are not looked at.
    """

    def __init__(self, functions: Iterable[Any], known: Collection[int] = ()):
        modules: list[nn.Module] = []
        self._parts = [(part, content_of(part)) for part in _reached(functions, modules)]
        self._tensors: dict[int, _Value] = {}
        self._large: list[tuple[Tensor, int]] = []  # with their versions: too large for a copy
        left = _MOST_COPIED
        for tensor in _loose(self._parts, {}):
            left -= tensor.nbytes
            if left > 0:
                self._tensors[id(tensor)] = _Value(tensor)
            else:
                self._large.append((tensor, version_of(tensor)))
        self._state = ModuleState(each for module in modules if id(module) not in known for each in module.modules())

    @property
    def lost(self) -> list[Tensor]:
        """Tensors that have changed and are not put back, as no copy of them was made."""
        return [tensor for tensor, version in self._large if version_of(tensor) != version]

    @property
    def written_buffers(self) -> list[tuple[nn.Module, str]]:
        """The buffers of the modules that have changed."""
        return self._state.written_buffers

    def restore(self) -> None:
        _restore(self._parts, self._tensors)
        self._state.restore()


def _reached(functions: Iterable[Any], modules: list[nn.Module]) -> list[Any]:
    """The cells, containers and objects that functions use, nearest first; the modules among them are added to ``modules``."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = deque(functions)
    while waiting and len(seen) < _MOST_PARTS:
        value = waiting.popleft()
        if id(value) in seen or value.__class__ in _ATOMS - _CALLED:
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
            waiting += _items(content_of(value))
    return list(found.values())


def _mutable_parts(
    values: Iterable[Any], modules: list[nn.Module], iterators: dict[int, Any], known: dict[int, Any]
) -> list[Any]:
    """The containers, arrays and objects of the user's classes among ``values`` and within them that are not ``known``, each once, and
    then are; the modules and iterators there are added to ``modules`` and, by id, ``iterators``."""
    found: list[Any] = []
    waiting = [(value, _DEPTH) for value in values]
    while waiting:
        value, depth = waiting.pop()
        kind = value.__class__
        if kind in _ATOMS or id(value) in known or depth == 0:
            continue
        if isinstance(value, tuple | frozenset):
            waiting += [(item, depth - 1) for item in value]
        elif isinstance(value, nn.Module):
            modules.append(value)
        elif is_iterator(kind):
            iterators[id(value)] = value
        elif is_mutable(value):
            known[id(value)] = value
            found.append(value)
            waiting += [(item, depth - 1) for item in _items(content_of(value))]
    return found


def plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path within a module, and value, of what it keeps as attributes and in containers there; not its parameters and buffers."""
    parts: list[tuple[str, Any]] = [("", _own(module))]
    seen: set[int] = set()
    while parts:
        path, part = parts.pop()
        content = content_of(part)
        pairs = (
            content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
        )
        for key, value in pairs:
            name = f"{path}.{key}" if path else str(key)
            yield name, value
            if is_mutable(value) and id(value) not in seen and name.count(".") < _DEPTH:
                seen.add(id(value))
                parts.append((name, value))


_CALLED = frozenset({types.FunctionType, types.MethodType})
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type}) | _CALLED


def keeps_attributes(module: nn.Module) -> bool:
    """Whether a module may keep Python state that a forward changes: layers of torch keep none."""
    return not _is_of_torch(type(module))


@cache
def _is_of_torch(kind: type) -> bool:
    """Whether a class of modules, below what FSDP2 and parametrizations put on top of it, is one of torch's layers."""
    return all(cls.__module__.startswith(("torch.nn.", "torch.distributed.", "builtins")) for cls in kind.__mro__)


def _own(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in own_attributes(module).items()
        if not name.startswith("_shardwise") and not (name == "forward" and hasattr(value, REPLACES))
    }


def is_mutable(value: Any) -> bool:
    """Whether a value is a container, an array or an object of a user's class: a part, which may hold something else later."""
    if isinstance(value, dict | list | set | deque | bytearray | array | types.SimpleNamespace | types.CellType):
        return True
    kind = type(value)
    home = str(kind.__module__).partition(".")[0]
    if home == "numpy":
        return kind.__name__ == "ndarray"
    if home in _PLAIN:
        return isinstance(getattr(value, "__dict__", None), dict)
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType) or home in _OPAQUE:
        return False
    if is_of_python(home):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots(kind))


@cache
def is_of_python(name: str) -> bool:
    """Whether a module is one of Python's own, and not a user's of the same name."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.stdlib_module_names and (file is None or Path(file).is_relative_to(_STDLIB))


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """The attributes that objects of a class keep in slots, as those of a dataclass with ``slots=True``."""
    named = [vars(cls).get("__slots__", ()) for cls in kind.__mro__]
    names = [name for each in named for name in ((each,) if isinstance(each, str) else each)]
    return tuple(name for name in names if isinstance(getattr(kind, name, None), types.MemberDescriptorType))


def _attributes_of(part: Any) -> dict[str, Any]:
    slots = {name: getattr(part, name) for name in _slots(type(part)) if hasattr(part, name)}
    return {**getattr(part, "__dict__", {}), **slots}


def content_of(part: Any) -> Any:
    """A shallow copy of what a mutable part holds."""
    if isinstance(part, dict):
        return dict(dict.items(part))  # not what a class of its own would give
    if isinstance(part, list | deque):
        return list(part)
    if isinstance(part, set):
        return set(part)
    if isinstance(part, bytearray | array):
        return part[:]
    if isinstance(part, types.CellType):
        return [part.cell_contents] if _is_filled(part) else []
    return part.copy() if type(part).__module__ == "numpy" else _attributes_of(part)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _items(content: Any) -> Collection[Any]:
    if isinstance(content, dict):
        return content.values()
    return content if isinstance(content, list | set) else ()


def is_same(now: Any, before: Any) -> bool:
    """Whether a part has the same content: the same objects, or equal bytes and numbers."""
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is value for key, value in before.items())
    if isinstance(now, list):
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if isinstance(now, set | bytearray | array):
        return now == before
    return now.shape == before.shape and now.tobytes() == before.tobytes()


def changed_values(now: Any, before: Any) -> list[Any]:
    """The values in the content of a part that were not in it before."""
    if isinstance(now, dict):
        return [value for key, value in now.items() if key not in before or before[key] is not value]
    if isinstance(now, list | set) and not is_same(now, before):
        known = set(map(id, before))
        return [value for value in now if id(value) not in known]
    if isinstance(now, array):
        return [] if is_same(now, before) else list(now)
    return [now] if type(now).__module__ == "numpy" and not is_same(now, before) else []


def put(part: Any, content: Any) -> None:
    """Makes a part hold what :func:`content_of` has shown."""
    if isinstance(part, dict):
        kind: Any = OrderedDict if isinstance(part, OrderedDict) else dict  # not what a class of its own would do
        kind.clear(part)
        for key, value in content.items():
            kind.__setitem__(part, key, value)
    elif isinstance(part, set):
        part.clear()
        part.update(content)
    elif isinstance(part, types.CellType):
        if content:
            part.cell_contents = content[0]
    elif isinstance(part, list | bytearray | array):
        part[:] = content
    elif isinstance(part, deque):
        part.clear()
        part.extend(content)
    elif type(part).__module__ == "numpy":
        part[...] = content
    else:
        for name in _attributes_of(part).keys() - content.keys():
            object.__delattr__(part, name)
        for name, value in content.items():
            object.__setattr__(part, name, value)  # as a frozen dataclass refuses setattr


def _loose(parts: Iterable[tuple[Any, Any]], attributes: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that are attributes, or in a part, and not parameters."""
    found: dict[int, Tensor] = {}
    for content in (attributes, *(content for _, content in parts)):
        for value in _items(content):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad:
                found[id(value)] = value
    return iter(found.values())
