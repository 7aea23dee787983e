"""One function as it is read: its names, and what its statements do to them and to the flow of control.

``doubt`` runs through everything: None = every rank gets here alike; else the reason why some may not. A statement
gives back the doubt it leaves for what comes after it: a ``return`` or ``break`` that some ranks may take puts the
rest of the function, or of the loop, in doubt. What is assigned in doubt is something ranks may differ in.
"""

import ast
from dataclasses import dataclass

from shardwise.anatomy.code.abstract import (
    Known,
    Plain,
    Value,
    join,
    objects_of,
    unsteady,
)
from shardwise.anatomy.code.objects import identity
from shardwise.anatomy.code.params import Args, bind
from shardwise.anatomy.code.source import can_swallow
from shardwise.anatomy.code.stores import Stores

__all__ = ["Frame"]

_MAX_PASSES = 8  # over a loop's body, until what is known no longer changes


@dataclass
class _Exits:
    """Doubts left behind: some ranks may have returned, or left or cut short the loop."""

    function: str | None = None
    loop: str | None = None

    @property
    def any(self) -> str | None:
        return self.function or self.loop

    def add(self, other: "_Exits") -> None:
        self.function = self.function or other.function
        self.loop = self.loop or other.loop


class Frame(Stores):
    """Reads one function; see the module's text."""

    def run(self, args: Args, doubt: str | None) -> Value:
        """Reads the body once for these arguments; gives what it returns."""
        node = self.source.node
        self.env = bind(node.args, args)
        self.given = {id(value) for value in self.env.values()}
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, doubt)
        if self.source.is_generator:
            doubt = doubt or self.where("a generator, which may not be run to its end,", node)
        self.body(node.body, doubt)
        returned = self.returned or Plain(True, True)
        return unsteady(returned, doubt or "") if self.source.is_generator else returned

    # ---- statements ------------------------------------------------------------------------------------------

    def body(self, statements: list[ast.stmt], doubt: str | None) -> _Exits:
        exits = _Exits()
        for statement in statements:
            exits.add(self.statement(statement, doubt or exits.any) or _Exits())
        return exits

    def statement(self, node: ast.stmt, doubt: str | None) -> _Exits | None:
        match node:
            case ast.If():
                return self._if(node, doubt)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, doubt)
            case ast.With() | ast.AsyncWith():
                return self._with(node, doubt)
            case ast.Try() | ast.TryStar():
                return self._try(node, doubt)
            case ast.Match():
                return self._match(node, doubt)
            case ast.Return():
                return self._return(node, doubt)
            case ast.Break() | ast.Continue():
                return _Exits(loop=doubt)
            case ast.Assign(targets=targets, value=value):
                self.assign(targets, self.evaluate(value, doubt), doubt)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign([target], self.evaluate(value, doubt), doubt)
            case ast.AugAssign(target=target, op=op, value=value):
                left = self.evaluate(_as_load(target), doubt)
                self.assign([target], self.binary(left, op, self.evaluate(value, doubt)), doubt)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.define(node, doubt)
            case ast.Import() | ast.ImportFrom():
                self.import_names(node)
            case ast.Delete(targets=targets):
                for target in targets:
                    self.delete(target)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.env |= dict.fromkeys(names, Plain())
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.evaluate(child, doubt)
        return None

    def _return(self, node: ast.Return, doubt: str | None) -> _Exits:
        value = self.evaluate(node.value, doubt) if node.value is not None else Known(None)
        why = doubt or self.where("what is returned", node)
        value = unsteady(value, why) if doubt else value
        before = self.returned
        self.returned = value if before is None else join(before, value, steady=doubt is None, why=why)
        return _Exits(function=doubt)

    def _if(self, node: ast.If, doubt: str | None) -> _Exits:
        test = self.evaluate(node.test, doubt)
        inner = doubt if test.steady else doubt or self.where(f"`if {_short(node.test)}`", node)
        return self._branches([node.body, node.orelse], doubt, inner)

    def _branches(self, bodies: list[list[ast.stmt]], doubt: str | None, inner: str | None) -> _Exits:
        """Several ways to go on; ``inner`` is the doubt in each of them."""
        before, exits, after = dict(self.env), _Exits(), []
        for body in bodies:
            self.env = dict(before)
            exits.add(self.body(body, inner))
            after.append(self.env)
        self.env = self._joined(after, inner is doubt, inner or "")
        return exits

    def _joined(self, envs: list[dict[str, Value]], steady: bool, why: str) -> dict[str, Value]:
        found = dict(envs[0])
        for env in envs[1:]:
            for name in found.keys() | env.keys():
                a, b = found.get(name), env.get(name)
                if a is None or b is None:  # bound in one of them only
                    one = a or b or Plain()
                    found[name] = one if steady else unsteady(one, why)
                else:
                    found[name] = join(a, b, steady=steady, why=why)
        return found

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, doubt: str | None) -> _Exits:
        inner, exits, element = doubt, _Exits(), Plain()
        if isinstance(node, ast.While):
            inner = doubt or self.where("a while loop", node)
        else:
            element, steady = self.loop_element(node.iter, doubt)
            if not steady or isinstance(node, ast.AsyncFor):
                inner = doubt or self.where(f"a loop over `{_short(node.iter)}`, whose length may differ,", node)
        for _ in range(_MAX_PASSES):
            before = dict(self.env)
            if isinstance(node, ast.While):
                self.evaluate(node.test, inner)
            else:
                self.assign([node.target], element, inner or exits.any)
            exits.add(self.body(node.body, inner or exits.any))
            now = exits.any or inner
            self.env = self._joined([before, self.env], now is None, now or "")
            if all(_alike(before.get(name), value) for name, value in self.env.items()):
                break
        else:
            self.env = {name: unsteady(value, self.where("a loop", node)) for name, value in self.env.items()}
            self.body(node.body, inner or self.where("a loop", node))
        exits.add(self.body(node.orelse, inner or exits.any))
        return _Exits(function=exits.function)

    def _with(self, node: ast.With | ast.AsyncWith, doubt: str | None) -> _Exits:
        for item in node.items:
            if self._swallows(item.context_expr, doubt):
                doubt = doubt or self.where("an exception inside a with block", node)
            if item.optional_vars is not None:
                self.assign([item.optional_vars], Plain(), doubt)
        return self.body(node.body, doubt)

    def _swallows(self, node: ast.expr, doubt: str | None) -> bool:
        """Whether the context may catch an exception, so that what is in the block is cut short."""
        maker = self.evaluate(node.func, doubt) if isinstance(node, ast.Call) else None
        made = self.evaluate(node, doubt)
        known = maker if maker is not None else made
        return not isinstance(known, Known) or can_swallow(known.obj)

    def _try(self, node: ast.Try | ast.TryStar, doubt: str | None) -> _Exits:
        inner, exits = doubt, _Exits()
        if node.handlers:
            inner = doubt or self.where("an exception that is caught", node)
        exits.add(self.body([*node.body, *node.orelse], inner))
        for handler in node.handlers:
            if handler.name:
                self.env[handler.name] = Plain()
            exits.add(self.body(handler.body, inner))
        exits.add(self.body(node.finalbody, doubt))
        return exits

    def _match(self, node: ast.Match, doubt: str | None) -> _Exits:
        subject = self.evaluate(node.subject, doubt)
        inner = doubt if subject.steady else doubt or self.where(f"`match {_short(node.subject)}`", node)
        for case in node.cases:
            for name in (n.name for n in ast.walk(case.pattern) if isinstance(n, ast.MatchAs | ast.MatchStar)):
                if name:
                    self.env[name] = unsteady(subject, inner or "")
            if case.guard is not None and not self.evaluate(case.guard, inner).steady:
                inner = inner or self.where(f"`case ... if {_short(case.guard)}`", node)
        return self._branches([*(case.body for case in node.cases), []], doubt, inner)

    def where(self, what: str, node: ast.AST) -> str:
        """``what`` with the file and line it stands in, as a reason."""
        code = self.source.function.__code__
        first = getattr(self.source.node, "lineno", 1) - self._decorators()
        line = code.co_firstlineno + getattr(node, "lineno", first) - first
        return f"{what} at {code.co_filename.rpartition('/')[2]}:{line} decides at run time"

    def _decorators(self) -> int:
        """Lines of decorators above the definition: code objects count from the first of them."""
        above = [d.lineno for d in getattr(self.source.node, "decorator_list", [])]
        return self.source.node.lineno - min(above) if above else 0


def _as_load(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _alike(a: Value | None, b: Value) -> bool:
    if a is b:
        return True
    same = type(a) is type(b) and (a.steady, a.kind) == (b.steady, b.kind)  # type: ignore[union-attr]
    return same and set(map(identity, objects_of(a))) == set(map(identity, objects_of(b)))  # type: ignore[arg-type]


def _short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 50 else text[:47] + "..."
