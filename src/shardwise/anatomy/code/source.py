"""The source of a function as a syntax tree, or None where there is none that can be trusted."""

import ast
import contextlib
import functools
import inspect
import re
import sys
import textwrap
import types
from dataclasses import dataclass

__all__ = ["Source", "can_swallow", "is_set_globally", "is_torch", "is_trusted", "source_of"]

_TRUSTED = {"torch", "transformers"}  # their decorators call what they wrap, once and whatever the data


@dataclass(frozen=True, eq=False)
class Source:
    """A function and its code. ``function`` is what the tree belongs to, below decorators that are known to call it."""

    function: types.FunctionType
    node: ast.FunctionDef | ast.Lambda

    @property
    def is_generator(self) -> bool:
        """Whether calling it only makes a generator, which its user may leave half run."""
        return inspect.isgeneratorfunction(self.function)


def source_of(function: object) -> Source | None:
    """The tree of ``function``. None for what is not written in Python, not in a file, or no longer what the file says."""
    while isinstance(function, types.FunctionType) and _is_trusted_wrapper(function):
        function = function.__wrapped__  # type: ignore[attr-defined]
    if not isinstance(function, types.FunctionType) or inspect.iscoroutinefunction(function):
        return None
    node = _tree(function.__code__)
    return Source(function, node) if node is not None else None


def is_torch(function: object) -> bool:
    """Whether ``function`` is code of torch's own."""
    return _home(function) == "torch"


def is_trusted(function: object) -> bool:
    """Whether ``function`` is of a library that leaves nothing behind in what it is given, as far as its forwards go."""
    return _home(function) in _TRUSTED


@functools.lru_cache(maxsize=1024)
def is_set_globally(module: str, name: str) -> bool:
    """Whether a function of ``module`` sets its global ``name`` while running."""
    try:
        text = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False
    return re.search(rf"\bglobal\b[^\n]*\b{re.escape(name)}\b", text) is not None


def can_swallow(context: object) -> bool:
    """Whether a ``with`` over ``context``, an object or what makes one, may go on after an exception."""
    if isinstance(context, types.FunctionType | types.MethodType):
        source = source_of(inspect.unwrap(context))
        return source is None or any(isinstance(node, ast.ExceptHandler) for node in ast.walk(source.node))
    kind = context if isinstance(context, type) else type(context)
    leave = getattr(kind, "__exit__", None)
    if kind is contextlib.nullcontext or is_trusted(leave) or kind.__module__ in {"builtins", "threading", "_thread"}:
        return False
    source = source_of(leave)
    return source is None or any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(source.node))


def _home(function: object) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]


def _is_trusted_wrapper(function: types.FunctionType) -> bool:
    return _home(function) in _TRUSTED and isinstance(getattr(function, "__wrapped__", None), types.FunctionType)


@functools.lru_cache(maxsize=4096)
def _tree(code: types.CodeType) -> ast.FunctionDef | ast.Lambda | None:
    try:
        # Of the code, not of the function: inspect would look through decorators, which may skip what they wrap.
        text = inspect.getsource(code)
    except (OSError, TypeError, IndentationError):
        return None
    parsed = _parse(textwrap.dedent(text)) or _parse("if True:\n" + text)
    if parsed is None:
        return None
    wanted = [node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    named = [node for node in wanted if getattr(node, "name", "<lambda>") == code.co_name and _fits(node, code)]
    if len(named) != 1 and code.co_name == "<lambda>":
        return None  # two lambdas on one line look alike
    return named[0] if named else None


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def _fits(node: ast.FunctionDef | ast.Lambda, code: types.CodeType) -> bool:
    """Whether the tree has the code's arguments and names: a file that changed since, or a class made by ``exec`` under the
    name of another file, gives the text of something else."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = code.co_argcount + code.co_kwonlyargcount
    if tuple(a.arg for a in arguments) != code.co_varnames[:count]:
        return False
    body = node.body if isinstance(node.body, list) else [node.body]
    attributes = {n.attr for part in body for n in _evaluated(part) if isinstance(n, ast.Attribute)}
    used = {name for inner in _codes(code) for name in inner.co_names}
    return {a for a in attributes if not a.startswith("__")} <= used


def _evaluated(node: ast.AST):
    """``node`` and what is below it, without annotations, which may never be evaluated."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _evaluated(child)


def _codes(code: types.CodeType):
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)
