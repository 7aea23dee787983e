"""Calls of Python's own functions, and methods of lists and dicts: how modules come out of containers."""

import ast
import builtins
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.anatomy.code.abstract import (
    Choice,
    Known,
    Plain,
    Seq,
    Tup,
    Value,
    VarArgs,
    element_of,
    join,
    objects_of,
    plain_from,
    unsteady,
)
from shardwise.anatomy.code.objects import children_of
from shardwise.anatomy.code.params import Args

__all__ = ["ContainerCalls"]

_SAME_ITEMS = (list, tuple, iter, reversed)
_COMPUTED = (int, bool, float, str, min, max, abs, round, sum, range, divmod, pow, repr, format)
_ASKED = (isinstance, issubclass, callable, hasattr, type)  # of what kind something is
_GROW = {"append", "extend", "insert"}
_MUTATORS = {
    "append", "extend", "insert", "pop", "remove", "clear", "update", "popitem", "add_module", "register_module",
    "reverse", "sort", "__setitem__", "__delitem__", "setdefault",
}  # fmt: skip


class ContainerCalls:
    """The part of a frame that knows containers; the attributes below are set by the classes that build on it."""

    entries: Any
    env: dict[str, Value]
    given: set[int]
    arguments: Callable[..., Args]
    attribute: Callable[..., Value]
    write: Callable[..., None]

    # ---- built-in functions ----------------------------------------------------------------------------------

    def builtin(self, obj: Any, args: Args, doubt: str | None) -> Value | None:
        """A call of Python's own functions; None for anything else."""
        values = tuple(args.values())
        first: Value = args.positional[0] if args.positional else Plain(True, True)
        if obj is len:
            return Plain(steady := element_of(first, "")[1], steady)
        if _is_one_of(obj, _ASKED):
            return Plain(all(value.kind for value in values), True)
        if _is_one_of(obj, _COMPUTED) and not any(map(objects_of, values)):
            return plain_from(values)
        if obj is sum or obj is print or obj is id:
            return Plain(False, True)
        if _is_one_of(obj, _SAME_ITEMS) and len(values) <= 1:
            return Seq(*element_of(first, "its parent keeps it in a list"))
        if obj is set or obj is frozenset:
            element, same = element_of(first, "")
            return Seq(unsteady(element, "its parent iterates over a set, in another order on every rank"), same)
        if obj is enumerate or obj is zip:
            return self._zipped(obj, values)
        if obj is getattr and len(args.positional) >= 2:
            return self._getattr(args, doubt)
        if obj is setattr or obj is builtins.delattr:
            self._setattr(args, doubt)
            return Plain(True, True)
        if _is_one_of(obj, (exec, eval, locals, globals)):
            for value in list(self.env.values()):
                self.entries.lose(value, doubt or f"{obj.__name__}() may do anything with it")
            return Plain()
        if obj is vars or obj is dir:
            return Choice(objects_of(first), False, "its parent reads it from vars()") if objects_of(first) else Plain()
        return None

    def _zipped(self, obj: Any, values: tuple[Value, ...]) -> Value:
        elements = [element_of(value, "its parent iterates over it in step with something else") for value in values]
        steady = all(same for _, same in elements)
        if obj is enumerate:
            return Seq(Tup((Plain(steady, True), elements[0][0])), steady) if elements else Plain()
        parts = tuple(
            e if steady else unsteady(e, "it is zipped with something whose length may differ") for e, _ in elements
        )
        return Seq(Tup(parts), steady)

    def _getattr(self, args: Args, doubt: str | None) -> Value:
        base, name = args.positional[0], args.positional[1]
        if isinstance(name, Known) and isinstance(name.obj, str):
            return self.attribute(base, name.obj, doubt)
        inner = tuple(child for obj in objects_of(base) for child in children_of(obj))
        if not inner:
            return Plain(base.steady and name.steady, name.steady)
        return Choice(inner, name.steady, "its parent gets it by a name made while running")

    def _setattr(self, args: Args, doubt: str | None) -> None:
        if len(args.positional) == 3:
            base, name, value = args.positional
            attr = name.obj if isinstance(name, Known) and isinstance(name.obj, str) else "*"
            self.write(base, attr, value if attr != "*" else Plain(), doubt)
        elif args.positional:
            self.entries.lose(args.positional[0], "an attribute of it is deleted while running")

    # ---- containers ------------------------------------------------------------------------------------------

    def container_method(self, base: Value, node: ast.Call, doubt: str | None) -> Value | None:
        """``values()``, ``items()``, ``append()`` and the like; None where ``base`` is no container."""
        attr = node.func.attr  # type: ignore[union-attr]
        if isinstance(base, Tup | Seq) and not isinstance(base, VarArgs):
            return self._list_method(base, attr, node, doubt)
        objs = objects_of(base)
        if not isinstance(base, Known | Choice) or not objs or not all(map(_is_container, objs)):
            return None
        if isinstance(base, Known) and attr in getattr(base.obj, "_modules", ()):
            return None  # self.transformer.wte(x): a module of a ModuleDict, called by its name
        why = f"its parent goes over .{attr}()"
        children = Choice(tuple(child for obj in objs for child in children_of(obj)), base.steady, why)
        if attr in {"values", "children"}:
            return Seq(children, base.steady)
        if attr in {"items", "named_children"}:
            return Seq(Tup((Plain(base.steady, True), children)), base.steady)
        if attr == "keys":
            return Seq(Plain(base.steady, True), base.steady)
        if isinstance(base, Known) and hasattr(type(base.obj), attr) and attr not in _MUTATORS:
            return None
        self.arguments(node, doubt)
        self.entries.lose(base, doubt or f".{attr}() is called on its list while running")
        return children if attr == "pop" else Plain()

    def _list_method(self, base: Tup | Seq, attr: str, node: ast.Call, doubt: str | None) -> Value:
        """A method of a list made in the code that is read."""
        args = self.arguments(node, doubt)
        values = tuple(args.values())
        element, steady = element_of(base, "its parent keeps it in a list")
        name = node.func.value.id if isinstance(node.func.value, ast.Name) else None  # type: ignore[union-attr]
        after: Value = base
        if attr in _GROW and values:
            added = element_of(values[0], "")[0] if attr == "extend" else values[-1]
            nothing_yet = isinstance(base, Tup) and not base.parts
            whole = added if nothing_yet else join(element, added, steady=True, why="its parent keeps it in a list")
            after = Seq(whole, steady)
        elif attr not in {"index", "count", "copy"}:
            self.entries.lose(base, doubt or f"its list is changed by .{attr}()")
            after = Seq(unsteady(element, f"its list is changed by .{attr}()"), False)
        if name is not None:
            self.env[name] = unsteady(after, doubt) if doubt else after
        if attr in _GROW and (name is None or id(base) in self.given):  # a list that others hold as well
            for value in values:
                self.entries.lose(value, doubt or "its parent puts it into a list")
        return element if attr == "pop" else Plain()


def _is_container(obj: Any) -> bool:
    return isinstance(obj, nn.ModuleList | nn.ModuleDict | nn.Sequential | list | tuple | dict)


def _is_one_of(obj: Any, known: tuple[Any, ...]) -> bool:
    return any(obj is one for one in known)
