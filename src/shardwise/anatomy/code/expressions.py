"""What an expression stands for, as far as it can be known without running it; calls in it are reported as they are met."""

import ast
import builtins
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.anatomy.code.abstract import (
    RANK_FREE,
    Choice,
    Known,
    Local,
    Plain,
    Seq,
    Tup,
    Value,
    element_of,
    item_of,
    join,
    objects_of,
    plain_from,
    unsteady,
)
from shardwise.anatomy.code.calls import Calls
from shardwise.anatomy.code.objects import can_change, carries, cells_of, is_of_a_rank, unwrap_module
from shardwise.anatomy.code.params import Args
from shardwise.anatomy.code.source import Source, is_set_globally, is_torch

__all__ = ["Expressions"]

_BY_INDEX = "its parent picks its elements by index, which may differ by rank, instead of iterating"


class Expressions(Calls):
    """The half of a frame that reads expressions.

    Args:
        entries: what frames report to.
        source: the function.
        owner: the module whose method it is, if any: what ``super()`` means.
    """

    body: Callable[..., Any]
    store: Callable[..., None]
    loop_element: Callable[..., tuple[Value, bool]]

    def __init__(self, entries: Any, source: Source, owner: nn.Module | None):
        self.entries, self.source, self.owner = entries, source, owner
        self.env: dict[str, Value] = {}
        self.given: set[int] = set()  # arguments, which the caller holds as well
        self.outer: Expressions | None = None  # the frame a nested function is defined in
        self.returned: Value | None = None

    def evaluate(self, node: ast.expr, doubt: str | None) -> Value:
        """What ``node`` stands for."""
        self.entries.step()
        match node:
            case ast.Constant(value=value):
                return Known(value)
            case ast.Name(id=name):
                return self.lookup(name)
            case ast.Attribute(value=base, attr=attr):
                return self._attribute_of(base, attr, doubt)
            case ast.Subscript(value=base, slice=index):
                return self._subscript(base, index, doubt)
            case ast.Call():
                return self.call(node, doubt)
            case ast.IfExp():
                return self._if_expression(node, doubt)
            case ast.BoolOp():
                return self._and_or(node, doubt)
            case ast.Compare():
                return self._compare(node, doubt)
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(self.evaluate(left, doubt), op, self.evaluate(right, doubt))
            case ast.UnaryOp(operand=operand):
                return plain_from((self.evaluate(operand, doubt),))
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return self._display(elts, doubt)
            case ast.ListComp() | ast.DictComp():
                return self.comprehension(node, doubt)
            case ast.SetComp():
                return unsteady(self.comprehension(node, doubt), self.where("the order of a set", node))
            case ast.GeneratorExp():
                return self.comprehension(
                    node, doubt or self.where("a generator, which may not be run to its end,", node)
                )
            case ast.NamedExpr(target=target, value=value):
                found = self.evaluate(value, doubt)
                self.store(target, unsteady(found, doubt) if doubt else found, doubt)
                return found
            case ast.Lambda():
                return Local(node, self)
        parts = [self.evaluate(child, doubt) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if isinstance(node, ast.Set) and not any(map(objects_of, parts)):
            return Seq(Plain(), all(part.steady for part in parts))  # in an order of its own in every process
        if any(map(objects_of, parts)):  # a dict of modules, an await, a yield
            return Choice(objects_of(Tup(tuple(parts))), False, self.where("what is picked from a container", node))
        return plain_from(parts)

    # ---- names and attributes --------------------------------------------------------------------------------

    def lookup(self, name: str) -> Value:
        """A name: local, of a function around, global or built in."""
        if name in self.env:
            return self.env[name]
        if self.outer is not None:
            return self.outer.lookup(name)
        function = self.source.function
        cells = cells_of(function)
        if name in cells:
            return self.wrap(cells[name])
        if name in function.__globals__:
            found = function.__globals__[name]
            loose = isinstance(found, dict | list | set) and not carries(found)
            if loose or is_of_a_rank(name) or is_set_globally(str(function.__globals__.get("__name__")), name):
                return Plain()
            return self.wrap(found)
        return Known(getattr(builtins, name)) if hasattr(builtins, name) else Plain()

    def wrap(self, obj: Any) -> Value:
        """An object met while reading. Numbers and words may change between steps, alike on every rank: their values
        are not used."""
        obj = unwrap_module(obj)
        if isinstance(obj, bool | int | float | str):
            return Plain(True, True)
        if (id(obj), "*") in self.entries.written:
            return unsteady(Known(obj), "what a forward puts into it decides at run time")
        return Known(obj)

    def _attribute_of(self, node: ast.expr, attr: str, doubt: str | None) -> Value:
        base = self.evaluate(node, doubt) if attr not in RANK_FREE else self._untouched(node, doubt)
        found = self.attribute(base, attr, doubt)
        torchs = is_torch(self.source.function)  # torch's own forwards look at weights to choose a kernel
        if isinstance(found, Known) and isinstance(found.obj, nn.Parameter) and not torchs:
            self.entries.touch(found.obj)
        return found

    def _untouched(self, node: ast.expr, doubt: str | None) -> Value:
        """``self.block.weight`` in ``self.block.weight.dtype``: its values are not used."""
        if isinstance(node, ast.Attribute):
            return self.attribute(self.evaluate(node.value, doubt), node.attr, doubt)
        return self.evaluate(node, doubt)

    def attribute(self, base: Value, attr: str, doubt: str | None) -> Value:
        """``base.attr``."""
        match base:
            case Known(obj=obj):
                return self._attribute(obj, attr, doubt)
            case Choice(objs=objs, steady=steady, why=why):
                found = [self._attribute(obj, attr, doubt) for obj in objs if not isinstance(obj, Value)]
                whole: Value = found[0] if found else Plain()
                for other in found[1:]:
                    whole = join(whole, other, steady=True, why=why)
                return whole if steady else unsteady(whole, why)
        if attr in RANK_FREE:
            return Plain(True, True)
        if objects_of(base):
            return Choice(objects_of(base), False, f"it is used as .{attr} of something that is not followed")
        return Plain(base.steady, base.steady)

    def _attribute(self, obj: Any, attr: str, doubt: str | None) -> Value:
        obj = unwrap_module(obj)
        if isinstance(obj, Tensor):
            return Plain(attr in RANK_FREE, True)
        static = inspect.getattr_static(type(obj), attr, None)
        if isinstance(static, property):
            if not carries(obj):
                return Plain(True, True)
            return self.entries.follow(static.fget, Args((Known(obj),)), doubt, owner=_module(obj)) or Plain()
        if is_of_a_rank(attr):
            return Plain()
        try:
            found = self.wrap(getattr(obj, attr))
        except (AttributeError, RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            return Plain()  # only exists while running, or not at all
        if isinstance(obj, types.ModuleType) and isinstance(found, Known) and can_change(found.obj):
            return Plain()  # os.environ and the like
        written = self.entries.written
        if any(key in written for key in ((id(obj), attr), (0, attr), (id(obj), "*"))):
            return unsteady(found, f".{attr}, which a forward sets, decides at run time")
        return found

    # ---- parts and choices -----------------------------------------------------------------------------------

    def _subscript(self, node: ast.expr, index: ast.expr, doubt: str | None) -> Value:
        base = self.evaluate(node, doubt)
        if isinstance(index, ast.Slice):
            bounds = [self.evaluate(b, doubt) for b in (index.lower, index.upper, index.step) if b is not None]
            steady = all(bound.steady for bound in bounds)
            if isinstance(base, Plain):
                return Plain(base.steady and steady, base.kind)
            element, same = element_of(base, _BY_INDEX)
            return Seq(element if steady else unsteady(element, _BY_INDEX), steady and same)
        at = self.evaluate(index, doubt)
        const = at.obj if isinstance(at, Known) and isinstance(index, ast.Constant) else _negative(index)
        return item_of(base, at, const, _BY_INDEX)

    def _if_expression(self, node: ast.IfExp, doubt: str | None) -> Value:
        test = self.evaluate(node.test, doubt)
        why = self.where(f"`... if {ast.unparse(node.test)[:40]} else ...`", node)
        inner = doubt if test.steady else doubt or why
        return join(self.evaluate(node.body, inner), self.evaluate(node.orelse, inner), steady=test.steady, why=why)

    def _and_or(self, node: ast.BoolOp, doubt: str | None) -> Value:
        whole = self.evaluate(node.values[0], doubt)
        for value in node.values[1:]:
            steady, why = whole.steady, self.where("an and/or", node)
            other = self.evaluate(value, doubt if steady else doubt or why)
            whole = join(whole, other, steady=steady, why=why)
        return whole

    def _compare(self, node: ast.Compare, doubt: str | None) -> Value:
        parts = [self.evaluate(node.left, doubt)]
        for comparator in node.comparators:
            later = len(parts) > 1 and not all(part.steady for part in parts)
            parts.append(
                self.evaluate(comparator, (doubt or self.where("a chain of comparisons", node)) if later else doubt)
            )
        none = any(isinstance(c, ast.Constant) and c.value is None for c in (node.left, *node.comparators))
        if none and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return Plain(all(part.kind for part in parts), True)  # which arguments are given is the same on every rank
        return plain_from(parts)

    def binary(self, left: Value, op: ast.operator, right: Value) -> Value:
        """``left op right``."""
        if isinstance(op, ast.Add) and (objects_of(left) or objects_of(right)):
            element = join(element_of(left, "")[0], element_of(right, "")[0], steady=True, why="")
            return Seq(element, left.steady and right.steady)
        if objects_of(left) or objects_of(right):
            return Choice((*objects_of(left), *objects_of(right)), False, "it is computed with")
        return Plain(left.steady and right.steady, True)

    def _display(self, elts: list[ast.expr], doubt: str | None) -> Value:
        if not any(isinstance(element, ast.Starred) for element in elts):
            return Tup(tuple(self.evaluate(element, doubt) for element in elts))
        parts = [self.evaluate(e.value if isinstance(e, ast.Starred) else e, doubt) for e in elts]
        whole, steady = Plain(True, True), True
        for element, part in zip(elts, parts, strict=True):
            inner, same = element_of(part, "") if isinstance(element, ast.Starred) else (part, True)
            whole, steady = join(whole, inner, steady=True, why="a list written out"), steady and same
        return Seq(whole if steady else unsteady(whole, "a list whose length may differ"), steady)


def _negative(index: ast.expr) -> int | None:
    match index:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
    return None


def _module(obj: Any) -> nn.Module | None:
    return obj if isinstance(obj, nn.Module) else None
