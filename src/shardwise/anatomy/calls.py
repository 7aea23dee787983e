"""Which children a module is sure to enter in every forward, read from the source of its ``forward``.

Under FSDP every rank must enter the same units in the same order: an expert that one rank skips leaves the others
waiting, or (measured with experts in units of their own) gives gradients off by 0.5-2x without any error. Whether a child may be
skipped cannot be seen in the module tree, only in the code that calls it. So the code is read, conservatively: a child counts as
*surely entered* if a call to it stands where no data-dependent condition, early return or break can get around it.
Conditions on what is the same on every rank (``self.training``, configuration, flags, ``is None``) do not count.
Whatever is not understood counts as "may be skipped", which costs memory, never correctness.

A *path* says how a module is reached from ``self``: ``("embed",)``, ``("layers", "*")`` for every element of a list,
``("stages", "*", "*")`` for lists in a list.
"""

import ast
import inspect
import textwrap
import types
from dataclasses import dataclass, field

from torch import Tensor, nn

__all__ = ["Entered", "entered_children"]

Path = tuple[str, ...]
EACH = "*"
_MAX_DEPTH = 6  # helper methods calling helper methods
_NOT_ENTERING = {
    "isinstance", "issubclass", "len", "hasattr", "getattr", "id", "type", "print", "str", "repr", "range", "bool",
    "callable", "any", "all", "sum", "next", "iter", "dict", "set", "tuple", "super",
}  # fmt: skip
_SAME_ITEMS = {"enumerate", "reversed", "list", "tuple", "iter", "tqdm"}
_VIEW_METHODS = {"values", "items", "children", "named_children"}
_RANK_FREE = {"dim", "ndim", "dtype", "device", "is_cuda", "requires_grad", "is_floating_point", "ndimension"}


@dataclass
class Entered:
    """What the code of a forward shows: ``sure`` paths, and for the others seen why they may be skipped."""

    sure: set[Path] = field(default_factory=set)
    maybe: dict[Path, str] = field(default_factory=dict)
    unread: str | None = None  # why the source could not be read

    def add(self, path: Path, doubt: str | None) -> None:
        if doubt is None:
            self.sure.add(path)
            self.maybe.pop(path, None)
        elif path not in self.sure:
            self.maybe.setdefault(path, doubt)


def entered_children(module: nn.Module) -> Entered:
    """Paths of the children that ``module.forward`` enters; ``unread`` is set if there is no source to read."""
    found = Entered()
    forward = inspect.unwrap(type(module).forward)
    tree = _function_ast(forward)
    if tree is None:
        found.unread = f"the source of {type(module).__name__}.forward cannot be read"
        return found
    _Reader(module, forward, found, depth=0).read(tree, {_first_argument(tree): ()})
    return found


def _function_ast(function: object) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    node = tree.body[0] if tree.body else None
    return node if isinstance(node, ast.FunctionDef) else None


def _first_argument(node: ast.FunctionDef) -> str:
    arguments = [*node.args.posonlyargs, *node.args.args]
    return arguments[0].arg if arguments else ""


class _Reader:
    """Walks one function. ``names`` maps local names to paths; ``steady`` holds names equal on every rank."""

    def __init__(self, module: nn.Module, function: types.FunctionType, found: Entered, depth: int):
        self.module, self.function, self.found, self.depth = module, function, found, depth
        self.names: dict[str, Path] = {}
        self.steady: set[str] = set()

    def read(self, node: ast.FunctionDef, names: dict[str, Path], doubt: str | None = None) -> None:
        self.names.update(names)
        arguments = [*node.args.posonlyargs, *node.args.args]
        defaults = dict(zip([a.arg for a in arguments[::-1]], node.args.defaults[::-1], strict=False))
        defaults |= {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d}
        self.steady |= {name for name, default in defaults.items() if _is_flag(default)}
        self._body(node.body, doubt)

    # ---- statements ------------------------------------------------------------------------------------------

    def _body(self, statements: list[ast.stmt], doubt: str | None) -> str | None:
        """Reads statements in order; returns the doubt that holds after them."""
        for statement in statements:
            doubt = self._statement(statement, doubt) or doubt
        return doubt

    def _statement(self, node: ast.stmt, doubt: str | None) -> str | None:
        match node:
            case ast.If():
                return self._if(node, doubt)
            case ast.For():
                self._for(node, doubt)
            case ast.While():
                self._expression(node.test, doubt)
                self._body(node.body, doubt or self._where("a while loop", node))
            case ast.With():
                for item in node.items:
                    self._expression(item.context_expr, doubt)
                return self._body(node.body, doubt)
            case ast.Try():
                self._body([*node.body, *node.orelse, *node.finalbody], doubt)
                for handler in node.handlers:
                    self._body(handler.body, doubt or self._where("an except clause", handler))
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if value is not None:
                self._expression(value, doubt)
                self._bind(name, value)
            case ast.FunctionDef() | ast.ClassDef():
                pass  # entered only if called later, which is not followed
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, doubt)
                for name in (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)):
                    self.steady.discard(name)
        return None

    def _if(self, node: ast.If, doubt: str | None) -> str | None:
        self._expression(node.test, doubt)
        inner = doubt
        if not self._is_steady(node.test):
            inner = doubt or self._where(f"`if {_short(node.test)}`", node)
        before = set(self.steady)
        after = [self._body(branch, inner) for branch in (node.body, node.orelse)]
        if inner is not None:  # what a data-dependent branch assigns differs by rank from here on
            self.steady &= before - _stored_names(node)
        leaves = any(isinstance(n, ast.Return) for branch in (node.body, node.orelse) for n in _own_nodes(branch))
        if inner is not None and inner is not doubt and leaves:
            return self._where(f"an early return under `if {_short(node.test)}`", node)
        return next((a for a in after if a is not None and a is not inner), None)

    def _for(self, node: ast.For, doubt: str | None) -> None:
        self._expression(node.iter, doubt)
        over = self._items(node.iter)
        self._bind_loop(node.target, node.iter, over)
        if leave := self._loop_exit(node.body):
            doubt = doubt or leave
        if over is None and not self._counts_all(node.iter):
            doubt = doubt or self._where(f"a loop over `{_short(node.iter)}`, whose length may differ", node)
        self._body(node.body, doubt)
        self._body(node.orelse, doubt)

    def _loop_exit(self, body: list[ast.stmt]) -> str | None:
        """A doubt if a data-dependent condition holds a break, continue or return of this loop."""
        for statement in body:
            for inner in ast.walk(statement):
                if isinstance(inner, ast.If) and not self._is_steady(inner.test):
                    exits = (ast.Break, ast.Continue, ast.Return)
                    if any(isinstance(n, exits) for n in _own_nodes([*inner.body, *inner.orelse])):
                        return self._where(f"a loop left or cut short under `if {_short(inner.test)}`", inner)
        return None

    # ---- expressions -----------------------------------------------------------------------------------------

    def _expression(self, node: ast.expr, doubt: str | None) -> None:
        match node:
            case ast.Call():
                self._call(node, doubt)
            case ast.IfExp():
                self._expression(node.test, doubt)
                inner = doubt
                if not self._is_steady(node.test):
                    inner = doubt or self._where(f"`... if {_short(node.test)} else ...`", node)
                self._expression(node.body, inner)
                self._expression(node.orelse, inner)
            case ast.BoolOp():
                self._expression(node.values[0], doubt)
                inner = doubt if self._is_steady(node.values[0]) else doubt or self._where("an and/or", node)
                for value in node.values[1:]:
                    self._expression(value, inner)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                self._comprehension(node, doubt)
            case ast.Lambda():
                pass
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, doubt)

    def _comprehension(self, node, doubt: str | None) -> None:
        for generator in node.generators:
            self._expression(generator.iter, doubt)
            over = self._items(generator.iter)
            self._bind_loop(generator.target, generator.iter, over)
            if generator.ifs or (over is None and not self._counts_all(generator.iter)):
                doubt = doubt or self._where("a filtered or open-ended comprehension", node)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for part in parts:
            self._expression(part, doubt)

    def _call(self, node: ast.Call, doubt: str | None) -> None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        for argument in arguments:
            self._expression(argument, doubt)
        if not isinstance(node.func, ast.Name):
            self._expression(node.func, doubt)
        called = self._path(node.func)
        if called:
            if isinstance(self._value(node.func), types.MethodType):
                self._follow_method(node, called, doubt)
            else:
                self._enter(called, doubt)
            return
        if isinstance(node.func, ast.Attribute) and _is_super(node.func.value):
            self._follow(self._super_method(node.func.attr), node, doubt, bound=True)
            return
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        passed = [path for argument in arguments if (path := self._path(_strip_call(argument)))]
        if not passed or name in _NOT_ENTERING | _SAME_ITEMS | _VIEW_METHODS | {"zip"}:
            return
        function = getattr(self.function, "__globals__", {}).get(name)
        if isinstance(function, types.FunctionType) and "checkpoint" not in name:
            self._follow(function, node, doubt, bound=False)
            return
        for path in passed:  # checkpoint(block, x): handing a module to a call counts as calling it
            self._enter(path, doubt)

    def _enter(self, path: Path, doubt: str | None) -> None:
        self.found.add(tuple(part for part in path if part != "[]"), self._indexed(path) or doubt)

    def _indexed(self, path: Path) -> str | None:
        if "[]" in path:
            return f"its parent picks elements of {'.'.join(path[: path.index('[]')])} by index instead of iterating"
        return None

    def _follow_method(self, node: ast.Call, called: Path, doubt: str | None) -> None:
        method = self._value(node.func)
        owner = called[:-1]
        if owner == () and isinstance(method, types.MethodType):
            self._follow(method.__func__, node, doubt, bound=True)
        elif owner:  # self.encoder.encode(x): another route than forward; FSDP's hooks would not run
            self.found.add(owner, doubt or f"called through .{called[-1]}() instead of forward")

    def _follow(self, function: object, node: ast.Call, doubt: str | None, *, bound: bool) -> None:
        function = inspect.unwrap(function) if callable(function) else None
        tree = _function_ast(function) if function is not None and self.depth < _MAX_DEPTH else None
        if tree is None or not isinstance(function, types.FunctionType):
            return
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        names: dict[str, Path] = {arguments[0]: ()} if bound and arguments else {}
        for name, value in zip(arguments[bound:], node.args, strict=False):
            if (path := self._path(value)) is not None:
                names[name] = path
        for keyword in node.keywords:
            if keyword.arg and (path := self._path(keyword.value)) is not None:
                names[keyword.arg] = path
        _Reader(self.module, function, self.found, self.depth + 1).read(tree, names, doubt)

    def _super_method(self, name: str) -> object | None:
        defined = next((c for c in type(self.module).__mro__ if self.function in vars(c).values()), type(self.module))
        mro = type(self.module).__mro__
        return next((vars(c)[name] for c in mro[mro.index(defined) + 1 :] if name in vars(c)), None)

    # ---- names and paths -------------------------------------------------------------------------------------

    def _path(self, node: ast.expr) -> Path | None:
        """How ``node`` is reached from self, if it is a module, a list of them, or a method of one."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=attr):
                base = self._path(value)
                if base is None or (attr == "__call__"):
                    return base
                return (*base, attr)
            case ast.Subscript(value=value, slice=index):
                base = self._path(value)
                if base is None:
                    return None
                if isinstance(index, ast.Slice):
                    bounds = [b for b in (index.lower, index.upper, index.step) if b is not None]
                    return base if all(self._is_steady(bound) for bound in bounds) else (*base, "[]")
                return (*base, EACH) if self._is_full_index(index, base) else (*base, "[]")
        return None

    def _is_full_index(self, index: ast.expr, base: Path) -> bool:
        """``self.layers[i]`` inside ``for i in range(len(self.layers))`` runs over all of them."""
        return isinstance(index, ast.Name) and self.names.get(f"index {index.id}") == base

    def _items(self, node: ast.expr) -> Path | None:
        """Path of the elements that iterating over ``node`` gives, if they are modules of a list."""
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _SAME_ITEMS and node.args:
                return self._items(node.args[0])
            if isinstance(node.func, ast.Attribute) and node.func.attr in _VIEW_METHODS:
                return self._items(node.func.value)
            if isinstance(node.func, ast.Name) and node.func.id == "zip":
                return next((items for a in node.args if (items := self._items(a)) is not None), None)
            return None
        path = self._path(node)
        if path is None or "[]" in path or not isinstance(self._value(node), nn.Module | list | tuple | type(None)):
            return None
        return (*path, EACH)

    def _bind_loop(self, target: ast.expr, iterated: ast.expr, over: Path | None) -> None:
        for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
            self.names.pop(name, None)
            self.steady.discard(name)
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        function = iterated.func if isinstance(iterated, ast.Call) else None
        kind = getattr(function, "id", getattr(function, "attr", ""))
        if kind == "zip" and isinstance(iterated, ast.Call):
            for element, source in zip(targets, iterated.args, strict=False):
                self._bind_element(element, self._items(source))
        elif kind in {"enumerate", "items", "named_children"} and len(targets) == 2:
            self._bind_element(targets[1], over)
            if isinstance(targets[0], ast.Name):
                self.steady.add(targets[0].id)
                if kind == "enumerate" and over is not None:
                    self.names[f"index {targets[0].id}"] = over[:-1]
        elif kind == "range" and isinstance(targets[0], ast.Name):
            self.steady.add(targets[0].id)
            if (listed := self._range_over(iterated)) is not None:
                self.names[f"index {targets[0].id}"] = listed
        elif targets:
            self._bind_element(targets[0], over)

    def _bind_element(self, target: ast.expr, path: Path | None) -> None:
        if isinstance(target, ast.Name) and path is not None:
            self.names[target.id] = path
        elif isinstance(target, ast.Tuple) and path is not None:  # for i, (a, b) in enumerate(zip(...)): not followed
            return

    def _range_over(self, node: ast.expr) -> Path | None:
        match node:
            case ast.Call(args=[ast.Call(func=ast.Name(id="len"), args=[listed])]):
                return self._path(listed)
        return None

    def _counts_all(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "range" and self._is_steady(node)

    def _bind(self, name: str, value: ast.expr) -> None:
        path = self._path(value)
        if path is not None:
            self.names[name] = path
        else:
            self.names.pop(name, None)
        if self._is_steady(value):
            self.steady.add(name)
        else:
            self.steady.discard(name)

    def _value(self, node: ast.expr) -> object | None:
        """The object ``node`` stands for on this module, with the first element for 'each'."""
        path = self._path(node)
        value: object = self.module
        for part in path or ():
            if part in (EACH, "[]"):
                items = list(value.values()) if isinstance(value, nn.ModuleDict) else value
                value = next(iter(items), None) if hasattr(items, "__iter__") else None  # type: ignore[call-overload]
            else:
                value = getattr(value, part, None)
        return value if path is not None else None

    # ---- what is the same on every rank ----------------------------------------------------------------------

    def _is_steady(self, node: ast.expr) -> bool:
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name in self.steady or self.names.get(name) is not None
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return True  # is None: which arguments are given is the same on every rank
            case ast.Compare():
                return all(map(self._is_steady, [node.left, *node.comparators]))
            case ast.BoolOp():
                return all(map(self._is_steady, node.values))
            case ast.UnaryOp():
                return self._is_steady(node.operand)
            case ast.BinOp():
                return self._is_steady(node.left) and self._is_steady(node.right)
            case ast.IfExp():
                return all(map(self._is_steady, [node.test, node.body, node.orelse]))
            case ast.Tuple() | ast.List() | ast.Set():
                return all(map(self._is_steady, node.elts))
            case ast.Attribute(attr=attr):
                if self._path(node) is not None:
                    return not isinstance(self._value(node), Tensor)
                return attr in _RANK_FREE or self._is_steady(node.value)
            case ast.Subscript():
                return self._is_steady(node.value) and self._is_steady(node.slice)
            case ast.Call():
                return self._is_steady_call(node)
        return False

    def _is_steady_call(self, node: ast.Call) -> bool:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in {"isinstance", "hasattr", "callable", "issubclass"} or name in _RANK_FREE:
            return True
        if name in {"len", "getattr", "int", "bool", "range", "min", "max", "str"}:
            return all(map(self._is_steady, node.args))
        return not node.args and not node.keywords and name.startswith("is_")

    def _where(self, what: str, node: ast.AST) -> str:
        line = self.function.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
        file = self.function.__code__.co_filename.rpartition("/")[2]
        return f"{what} at {file}:{line} decides at run time"


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | str))


def _strip_call(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Attribute) and node.attr in {"__call__", "forward"}:
        return node.value
    return node


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _own_nodes(statements: list[ast.stmt]):
    """Nodes of these statements, without the bodies of nested functions."""
    stack: list[ast.AST] = list(statements)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def _stored_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 50 else text[:47] + "..."
