"""Scopes inside a function: comprehensions, nested functions and lambdas."""

import ast
from typing import Any, cast

from shardwise.anatomy.code.abstract import Local, Plain, Seq, Value, element_of, unsteady
from shardwise.anatomy.code.expressions import Expressions
from shardwise.anatomy.code.params import Args, bind

__all__ = ["Scopes"]


class Scopes(Expressions):
    """The part of a frame that opens scopes of their own."""

    def comprehension(self, node: Any, doubt: str | None) -> Value:
        """A comprehension, in a scope of its own."""
        before, steady, outer_doubt = dict(self.env), True, doubt
        for generator in node.generators:
            element, same = self.loop_element(generator.iter, doubt)
            if not same:
                steady = False
                doubt = doubt or self.where("a comprehension whose length may differ", node)
            self.store(generator.target, unsteady(element, doubt) if doubt else element, doubt)
            for condition in generator.ifs:
                if not self.evaluate(condition, doubt).steady:
                    steady = False
                    doubt = doubt or self.where(f"a comprehension `if {ast.unparse(condition)[:40]}`", node)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        values = [self.evaluate(part, doubt) for part in parts]
        named = {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr) and isinstance(n.target, ast.Name)}
        self.env = {**before, **{name: unsteady(self.env.get(name, Plain()), "a walrus") for name in named}}
        value = values[-1]
        return Seq(value if steady and outer_doubt is None else unsteady(value, doubt or ""), steady)

    def loop_element(self, iterated: ast.expr, doubt: str | None) -> tuple[Value, bool]:
        """What a loop over ``iterated`` binds, and whether it runs equally often on every rank."""
        return element_of(self.evaluate(iterated, doubt), "its parent iterates over it")

    # ---- functions defined in the code -----------------------------------------------------------------------

    def call_local(self, local: Local, args: Args, doubt: str | None) -> Value:
        """Calls a nested function or lambda, which sees the names around it as they are now."""
        node, home = local.node, local.frame
        if self.entries.nested.count(node) > 1:
            return Plain()  # it calls itself: read twice already
        frame = type(self)(self.entries, home.source, home.owner)
        frame.outer, frame.env = home, bind(node.args, args)
        self.entries.nested.append(node)
        try:
            return frame.read_nested(node, doubt)
        finally:
            self.entries.nested.pop()

    def read_nested(self, node: Any, doubt: str | None) -> Value:
        """The body of a nested function, whose parameters are bound already."""
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, doubt)
        own = [n for statement in node.body for n in ast.walk(statement)]
        shared = any(isinstance(n, ast.Nonlocal | ast.Global) for n in own)
        if shared or any(isinstance(n, ast.Yield | ast.YieldFrom | ast.Await) for n in own):
            doubt = doubt or self.where(f"`{node.name}`, which is not followed,", node)
            for n in own:
                if isinstance(n, ast.Nonlocal):
                    cast(Expressions, self.outer).env.update(dict.fromkeys(n.names, Plain()))
        self.body(node.body, doubt)
        return self.returned or Plain(True, True)
