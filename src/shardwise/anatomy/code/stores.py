"""What assignments, definitions and imports do to names, attributes and elements."""

import ast
import sys

from torch import nn

from shardwise.anatomy.code.abstract import (
    Known,
    Local,
    Plain,
    Seq,
    Tup,
    Value,
    element_of,
    item_of,
    objects_of,
    unsteady,
)
from shardwise.anatomy.code.params import Args
from shardwise.anatomy.code.scopes import Scopes

__all__ = ["Stores"]


class Stores(Scopes):
    """The part of a frame that binds names."""

    def assign(self, targets: list[ast.expr], value: Value, doubt: str | None) -> None:
        value = unsteady(value, doubt) if doubt else value
        for target in targets:
            self.store(target, value, doubt)

    def store(self, target: ast.expr, value: Value, doubt: str | None) -> None:
        """``target = value``."""
        match target:
            case ast.Name(id=name):
                self.env[name] = value
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                self._store_parts(elts, value, doubt)
            case ast.Starred(value=inner):
                self.store(inner, Seq(value, False), doubt)
            case ast.Attribute(value=base, attr=attr):
                self.write(self.evaluate(base, doubt), attr, value, doubt)
            case ast.Subscript(value=base, slice=index):
                self.evaluate(index, doubt)
                self._store_item(base, value, doubt)

    def _store_parts(self, elts: list[ast.expr], value: Value, doubt: str | None) -> None:
        starred = any(isinstance(element, ast.Starred) for element in elts)
        for i, element in enumerate(elts):
            why = "its parent takes elements apart"
            part = element_of(value, why)[0] if starred else item_of(value, Plain(True, True), i, why)
            if isinstance(value, Plain):
                part = Plain(value.steady, value.steady)
            self.store(element, part, doubt)

    def _store_item(self, base: ast.expr, value: Value, doubt: str | None) -> None:
        holder = self.evaluate(base, doubt)
        if isinstance(base, ast.Name) and base.id in self.env and not isinstance(holder, Known):
            why = doubt or "its parent puts it into a list"
            self.env[base.id] = unsteady(Tup((holder, value)), why)
        elif isinstance(base, ast.Attribute):
            self.write(self.evaluate(base.value, doubt), base.attr, value, doubt)
        else:
            self.entries.lose(value, doubt or "its parent puts it into a container")
        self.entries.lose(holder, self.where("an assignment to its elements", base))
        if isinstance(holder, Known) and (doubt is not None or not value.steady):
            self.entries.change(holder.obj)

    def write(self, base: Value, attr: str, value: Value, doubt: str | None) -> None:
        """``base.attr = value``: later reads of it, in any forward, must not count as equal on every rank."""
        held = objects_of(base)
        old = [getattr(obj, attr, None) for obj in held if isinstance(obj, nn.Module)]
        swaps = any(isinstance(item, nn.Module) for item in old)
        if value.steady and doubt is None and not swaps and not objects_of(value):
            return
        for obj in held or (None,):
            self.entries.written.setdefault((id(obj) if obj is not None else 0, attr), obj)
        for obj in objects_of(value):
            self.entries.lose(obj, doubt or f"its parent keeps it as .{attr}")

    def delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = Plain()
        elif isinstance(target, ast.Attribute | ast.Subscript):
            self.entries.lose(self.evaluate(target.value, None), self.where("a del", target))

    def define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, doubt: str | None) -> None:
        local = Local(node, self)
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            self.env[node.name] = unsteady(local, doubt) if doubt else local
            return
        self.env[node.name] = Plain()
        why = self.where(f"`{node.name}`, whose use is not followed,", node)
        for function in (n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
            self.call_local(Local(function, self), Args(unknown=True), doubt or why)

    def import_names(self, node: ast.Import | ast.ImportFrom) -> None:
        """Imports in a function: what is loaded already is known, nothing is loaded for it."""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom):
                name = alias.asname or alias.name
                found = getattr(sys.modules.get(node.module or "" if not node.level else ""), alias.name, None)
            else:
                found = sys.modules.get(alias.name if alias.asname else name)
            self.env[name] = self.wrap(found) if found is not None else Plain()
