"""What a reader of code knows about a value: the object itself, a choice among objects, or only whether ranks agree on it.

The reader (:mod:`shardwise.anatomy.code.frame`) never runs the code it reads. It follows modules, and lists of modules, as the
objects they are; of everything else it keeps two bits: *steady* = the value is equal on every rank, *kind* = at least its type,
and whether it is None, are. Whatever is not known is neither.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardwise.anatomy.code.objects import carries, children_of, distinct, identity, unwrap_module

__all__ = [
    "RANK_FREE",
    "Bound",
    "Choice",
    "Known",
    "KwArgs",
    "Local",
    "Plain",
    "Seq",
    "Tup",
    "Value",
    "VarArgs",
    "element_of",
    "item_of",
    "join",
    "objects_of",
    "plain_from",
    "unsteady",
]

RANK_FREE = {"dim", "ndim", "dtype", "device", "is_cuda", "is_meta", "requires_grad", "is_floating_point", "layout"}
_SEQUENCES = (nn.ModuleList, nn.Sequential)


class Value:
    """Base of what is known about a value."""

    @functools.cached_property  # asked at every join of branches
    def objects(self) -> tuple[Any, ...]:
        return _objects(self)

    if TYPE_CHECKING:  # fields in some, computed in others

        @property
        def steady(self) -> bool: ...

        @property
        def kind(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class Plain(Value):
    """No module in it."""

    steady: bool = False
    kind: bool = False


@dataclass(frozen=True, eq=False)
class KwArgs(Plain):
    """A function's ``**kwargs``: what the call gave, and whether more may come from outside the module."""

    given: tuple[tuple[str, Value], ...] = ()
    outside: bool = False


@dataclass(frozen=True, eq=False)
class Known(Value):
    """Exactly this object."""

    obj: Any
    kind = True

    @property
    def steady(self) -> bool:
        return not isinstance(self.obj, Tensor)


@dataclass(frozen=True, eq=False)
class Choice(Value):
    """One of ``objs``, each once. Steady: the same one on every rank, and in a full loop each of them; else ranks may
    differ."""

    objs: tuple[Any, ...]
    steady: bool
    why: str = ""

    def __post_init__(self):
        # Joined once more in every branch and pass of a loop, repeated objects would double each time.
        object.__setattr__(self, "objs", distinct(self.objs))

    @property
    def kind(self) -> bool:
        return self.steady


@dataclass(frozen=True, eq=False)
class Seq(Value):
    """A sequence made in the code that is read; steady: of the same length on every rank."""

    element: Value
    steady: bool
    kind = True


@dataclass(frozen=True, eq=False)
class Tup(Value):
    """A tuple or list written out."""

    parts: tuple[Value, ...]
    kind = True

    @functools.cached_property  # one tuple may be a part of many
    def steady(self) -> bool:
        return all(part.steady for part in self.parts)


@dataclass(frozen=True, eq=False)
class VarArgs(Tup):
    """A function's ``*args``; ``outside``: more may come from the caller of the whole module."""

    outside: bool = False


@dataclass(frozen=True, eq=False)
class Local(Value):
    """A function or lambda defined in the code that is read, with the frame it sees."""

    node: Any
    frame: Any
    steady = True
    kind = True


@dataclass(frozen=True, eq=False)
class Bound(Value):
    """``functools.partial`` of something: called with arguments that are not followed."""

    func: Value
    steady = True
    kind = True


def objects_of(value: Value) -> tuple[Any, ...]:
    """The objects through which ``value`` leads to modules, each once."""
    return value.objects


def _objects(value: Value) -> tuple[Any, ...]:
    match value:
        case Known(obj=obj):
            return (obj,) if carries(obj) else ()
        case Choice(objs=objs):
            return objs
        case Seq(element=element):
            return objects_of(element)
        case Tup(parts=parts):
            return distinct(obj for part in parts for obj in objects_of(part))
        case KwArgs(given=given):
            return distinct(obj for _, part in given for obj in objects_of(part))
        case Bound(func=func):
            return objects_of(func)
        case Local():
            return (value,)
    return ()


# ---- new values from old ----------------------------------------------------------------------------------------------


def plain_from(parts: Iterable[Value]) -> Plain:
    """What is computed from ``parts`` without anything else: equal on every rank if they are."""
    return Plain(steady := all(part.steady for part in parts), steady)


def unsteady(value: Value, why: str) -> Value:
    """``value`` where ranks may differ, as after an assignment that only some of them made."""
    objs = objects_of(value)
    if isinstance(value, Seq | Tup):
        return Seq(Choice(objs, False, why) if objs else Plain(), False)
    return Choice(objs, False, why) if objs else Plain()


def join(a: Value, b: Value, *, steady: bool, why: str) -> Value:
    """``a`` or ``b``, after two branches; ``steady``: every rank took the same one."""
    if a is b or (isinstance(a, Known) and isinstance(b, Known) and identity(a.obj) == identity(b.obj)):
        return a
    if not steady:
        return unsteady(
            Tup((a, b)) if isinstance(a, Seq | Tup) else Choice((*objects_of(a), *objects_of(b)), True), why
        )
    objs = (*objects_of(a), *objects_of(b))
    if not objs:
        return Plain(a.steady and b.steady, a.kind and b.kind)
    both = a.steady and b.steady
    if isinstance(a, Seq | Tup) or isinstance(b, Seq | Tup):
        return Seq(Choice(objs, both, why), both)
    return Choice(objs, both, why)


def element_of(value: Value, why: str) -> tuple[Value, bool]:
    """What a loop over ``value`` binds, and whether it runs equally often on every rank."""
    match value:
        case Known(obj=obj):
            return _element_of_object(obj)
        case Choice(objs=objs, steady=steady):
            inner = tuple(child for obj in objs for child in _element_objects(obj))
            return (Choice(inner, steady, why) if inner else Plain(steady, steady)), steady
        case Seq(element=element, steady=steady):
            return element, steady
        case VarArgs(parts=parts, outside=True):
            objs = objects_of(value)
            return (Choice(objs, False, why) if objs else Plain()), False
        case Tup(parts=parts):
            whole = functools.reduce(lambda a, b: join(a, b, steady=True, why=why), parts, parts[0]) if parts else None
            return (whole or Plain(True, True)), True
        case Plain(steady=steady):
            return Plain(steady, steady), steady
    return Plain(), False


def _element_of_object(obj: Any) -> tuple[Value, bool]:
    obj = unwrap_module(obj)
    if isinstance(obj, Tensor):
        return Plain(False, True), False
    inner = _element_objects(obj)
    if isinstance(obj, set | frozenset):  # in an order of its own in every process
        return (
            Choice(inner, False, "its parent iterates over a set, in another order on every rank") if inner else Plain()
        ), True
    if inner:
        return Choice(inner, True), True
    return Plain(not isinstance(obj, nn.Module) or isinstance(obj, nn.ModuleDict), True), True


def _element_objects(obj: Any) -> tuple[Any, ...]:
    if isinstance(obj, Local):  # in a dict or list written out: what comes out of it may be this
        return (obj,)
    if isinstance(obj, nn.ModuleDict | dict):  # a loop over a dict gives its keys
        return ()
    return tuple(child for child in children_of(obj) if carries(child))


def item_of(base: Value, index: Value, const: Any, why: str) -> Value:
    """``base[index]``; ``const`` is the index itself where it is written out, else None."""
    match base:
        case Known(obj=obj):
            if const is not None and (found := _const_item(unwrap_module(obj), const)) is not None:
                return Known(unwrap_module(found))
            inner = tuple(child for child in children_of(obj) if carries(child))
            return Choice(inner, index.steady, why) if inner else Plain(base.steady and index.steady, index.steady)
        case Choice(objs=objs, steady=steady):
            inner = tuple(child for obj in objs for child in children_of(obj) if carries(child))
            inner += tuple(obj for obj in objs if not children_of(obj))  # it stood in a dict or list written out
            return Choice(inner, steady and index.steady, why) if inner else Plain()
        case Tup(parts=parts):
            if isinstance(const, int) and -len(parts) <= const < len(parts):
                return parts[const]
            return join(element_of(base, why)[0], Plain(True, True), steady=index.steady, why=why)
        case Seq(element=element, steady=steady):
            return element if steady and index.steady else unsteady(element, why)
        case KwArgs(given=given):
            return dict(given).get(const, Plain())
    return plain_from((base, index))


def _const_item(obj: Any, const: Any) -> Any:
    listed = isinstance(obj, (*_SEQUENCES, list, tuple)) and isinstance(const, int) and -len(obj) <= const < len(obj)
    keyed = isinstance(obj, nn.ModuleDict | dict) and const in obj
    return obj[const] if listed or keyed else None  # type: ignore[index]
