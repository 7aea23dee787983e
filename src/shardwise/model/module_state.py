"""What a forward writes into modules besides its results: buffers, and the plain Python state beside them.

A cache is a tensor in a buffer and a number in an attribute that says how much of it is filled. Where a forward must not
count, both go back together: one without the other would be read wrong from then on.
"""

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import unseen
from shardwise.errors import UsageError
from shardwise.model.iterators import Iteration, is_iterator
from shardwise.model.kept_tensors import KeptTensor, loose_tensors, restore_parts, written_keys
from shardwise.model.mutable import ATOMS, changed_values, content_of, is_mutable, is_same, items_of, put
from shardwise.model.names import own_attributes
from shardwise.model.tensors import change_marks, has_no_memory

REPLACES = "_shardwise_replaces"
"""Attribute of a function that a technique has put in the place of a module's ``forward``: it is no state of the module."""

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_LARGEST = 1 << 30  # bytes of parameters that are copied
_DEPTH = 32  # containers within containers that are looked into, each once


class ModuleState:
    """Buffers of modules as they are now, with the Python state of the modules; :meth:`restore` puts back what has changed.

    Python state goes back for all modules, with tensors that are not registered. Modules of torch have none beside their buffers, and are
    looked at only if they have buffers.

    Args:
        modules: those that a forward may write. Those that they hold without having registered them, as in a list, are added.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._values: dict[int, KeptTensor] = {}  # by id, so that a buffer with two names stays one tensor
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
                self._values[id(buffer)] = KeptTensor(buffer, of_torch=not keeps_attributes(owner.module))

    @property
    def written_buffers(self) -> list[tuple[nn.Module, str]]:
        with unseen():
            changed = written_keys(self._values)
        return [
            (owner.module, name)
            for owner in self._owners
            for name, buffer in owner.module._buffers.items()
            if buffer is not owner.buffers.get(name) or id(buffer) in changed
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the buffers (the same objects, with their values) that have changed, and the Python state of their
        modules. May be called again. On a device it reads nothing for layers of torch: their buffers are written in any case."""
        with unseen():  # what only compares is no use of a buffer
            changed = written_keys(self._values)
        for owner in self._owners:
            owner.restore()
        for key in changed:
            self._values[key].restore()


class _Owner:
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
        tensors = loose_tensors(self._parts, self._attributes) if module._buffers or all_tensors else ()
        self._tensors = {id(tensor): self._kept(tensor) for tensor in tensors}
        self._iterators = {key: Iteration(iterator) for key, iterator in iterators.items()}
        self._is_plain = all(value.__class__ in ATOMS for value in self._attributes.values())

    def _kept(self, tensor: Tensor) -> KeptTensor:
        if has_no_memory(tensor):
            kind = type(self.module).__name__.removeprefix("FSDP")
            raise UsageError(
                f"a tensor of shape {list(tensor.shape)} that a {kind} keeps beside its parameters, and that has no memory",
                why="it is a view of a parameter that was gathered for a forward, as weight.detach() and weight.data are there, and freed behind it",
                fix="keep a copy: weight.detach().clone(); or compute what is needed of the parameter in each forward",
            )
        return KeptTensor(tensor)

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
            return bool(written_keys(self._tensors)) or any(each.may_have_run for each in self._iterators.values())

    def changed(self) -> list[Any]:
        """The values that are new, in the attributes or in what these hold."""
        if self.are_same():
            return []
        found = changed_values(_own(self.module), self._attributes)
        return found + [value for part, was in self._parts for value in changed_values(content_of(part), was)]

    def restore(self) -> None:
        """Puts back what has changed. Iterators are replaced by others at the same place."""
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
        restore_parts(parts, self._tensors)


def _with(content: Any, again: dict[int, Any]) -> Any:
    """The content of a part with other iterators in it."""
    if isinstance(content, dict):
        return {key: again.get(id(value), value) for key, value in content.items()}
    return [again.get(id(value), value) for value in content] if isinstance(content, list) else content


class TensorAttributes:
    """The attributes that a user's code has given the tensors of modules; :meth:`restore` puts back what has changed."""

    def __init__(self, modules: Iterable[nn.Module]):
        held = {id(x): x for module in modules for x in (*module._parameters.values(), *module._buffers.values())}
        self._tensors = [(x, dict(vars(x))) for x in held.values() if x is not None]

    def changed(self) -> list[Any]:
        return [value for x, was in self._tensors for value in changed_values(vars(x), was)]

    def restore(self) -> None:
        for x, was in self._tensors:
            if not is_same(vars(x), was):
                put(vars(x), was)


class ParameterState:
    """The parameters of modules; :meth:`restore` puts back what a forward has written or replaced.

    Raises:
        UsageError: by :meth:`restore`, where they are so large that no copy is kept, and one was written.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._held = [(module, dict(module._parameters)) for module in modules if module._parameters]
        params = {id(x): x for _, held in self._held for x in held.values() if x is not None and not x.is_meta}
        self._values: dict[int, KeptTensor] = {}
        self._large: dict[int, nn.Parameter] = {}
        if sum(param.nbytes for param in params.values()) <= _LARGEST:
            self._values = {key: KeptTensor(param) for key, param in params.items()}
        else:
            self._large = params
            self._marks = self._marks_of_large()

    def _marks_of_large(self) -> Tensor:
        return change_marks([param.detach() for param in self._large.values()])

    def restore(self) -> None:
        for module, held in self._held:
            if not is_same(module._parameters, held):
                put(module._parameters, held)
        restore_parts((), self._values)
        if self._large and not torch.equal(self._marks, self._marks_of_large()):
            raise UsageError(
                "example= for a model whose forward writes its parameters",
                why="it is run once to see the order of its blocks, and what that run has written would be trained with",
                fix="leave example out: the order of blocks is then seen when the model first runs",
            )


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
        if kind in ATOMS or id(value) in known or depth == 0:
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
            waiting += [(item, depth - 1) for item in items_of(content_of(value))]
    return found


def plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path within a module, and value, of what it and its parameters keep as attributes and in containers there; not its parameters and
    buffers."""
    tensors = ((name, vars(param)) for name, param in module._parameters.items() if param is not None)
    return _values_in([("", _own(module)), *tensors])


def values_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The same of a class of modules, and of what it inherits from other classes than torch's."""
    own: dict[str, dict[str, Any]] = {}
    for cls in reversed(kind.__mro__):
        if not _is_of_torch(cls):  # FSDP2's class of a module's has what `type(self).num += 1` counts
            values = {key: value for key, value in vars(cls).items() if not key.startswith("__")}
            own.setdefault(cls.__name__.removeprefix("FSDP"), {}).update(values)
    return _values_in([*own.items()])


def _values_in(parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
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
