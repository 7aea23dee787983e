"""What a call does: enters a module, runs a function that can be read, or hands modules to one that cannot."""

import ast
import functools
import types
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from shardwise.anatomy.code.abstract import (
    Bound,
    Choice,
    Known,
    KwArgs,
    Local,
    Plain,
    Seq,
    Tup,
    Value,
    VarArgs,
    join,
    objects_of,
    plain_from,
    unsteady,
)
from shardwise.anatomy.code.containers import ContainerCalls
from shardwise.anatomy.code.objects import can_change, carries
from shardwise.anatomy.code.params import Args
from shardwise.anatomy.code.source import is_trusted

__all__ = ["Calls"]

_CONSUMERS = (list, tuple, sum, set, frozenset, sorted, dict, max, min)  # run a generator to its end
_STEADY_CALLS = {
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_compiling", "is_scripting", "is_tracing",
    "is_available", "is_initialized", "get_world_size", "get_default_dtype", "is_torchdynamo_compiling", "is_exporting",
    "dim", "ndimension", "is_floating_point", "is_complex",
}  # fmt: skip
_ABOUT_MODULES = {
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "state_dict",
    "train",
    "eval",
    "extra_repr",
}


class Calls(ContainerCalls):
    """The part of a frame that reads calls; ``evaluate`` and the rest are in the classes that build on it."""

    source: Any
    owner: nn.Module | None
    evaluate: Callable[..., Value]
    comprehension: Callable[..., Value]
    where: Callable[..., str]
    call_local: Callable[..., Value]

    def call(self, node: ast.Call, doubt: str | None) -> Value:
        """Reads ``node`` and gives what it returns."""
        if isinstance(node.func, ast.Name) and node.func.id == "super" and "super" not in self.env:
            return Plain()
        if isinstance(node.func, ast.Attribute):
            if _is_super(node.func.value):
                method = self._super_method(node.func.attr)
                return self.call_object(method, self.arguments(node, doubt), doubt, node)
            base = self.evaluate(node.func.value, doubt)
            found = self.container_method(base, node, doubt)
            if found is not None:
                return found
            func = self.attribute(base, node.func.attr, doubt)
            if isinstance(base, KwArgs) and isinstance(node.func.value, ast.Name):
                self.env[node.func.value.id] = base if node.func.attr in {"get", "pop", "keys", "items"} else Plain()
        else:
            func = self.evaluate(node.func, doubt)
        consumes = isinstance(func, Known) and any(func.obj is known for known in _CONSUMERS)
        return self.call_value(func, self.arguments(node, doubt, consumes=consumes), doubt, node)

    def arguments(self, node: ast.Call, doubt: str | None, *, consumes: bool = False) -> Args:
        """The arguments of a call, read in order; ``consumes``: a generator given to it is run to its end."""
        positional: list[Value] = []
        keywords: dict[str, Value] = {}
        outside = unknown = False
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                found = self.evaluate(argument.value, doubt)
                if isinstance(found, Tup) and not unknown:
                    positional += found.parts
                    outside = outside or (isinstance(found, VarArgs) and found.outside)
                else:
                    positional += (
                        [Choice(objects_of(found), False, "it is given in *arguments")] if objects_of(found) else []
                    )
                    unknown = True
            elif isinstance(argument, ast.GeneratorExp) and consumes:
                positional.append(self.comprehension(argument, doubt))
            else:
                positional.append(self.evaluate(argument, doubt))
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, doubt)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, KwArgs):
                keywords |= dict(value.given)
                outside = outside or value.outside
            else:
                keywords |= {f"** {i}": Known(obj) for i, obj in enumerate(objects_of(value))}
                unknown = True
        return Args(tuple(positional), keywords, outside, unknown)

    # ---- by what is called -----------------------------------------------------------------------------------

    def call_value(self, func: Value, args: Args, doubt: str | None, node: ast.Call) -> Value:
        """Calls what ``func`` stands for."""
        match func:
            case Known(obj=obj):
                return self.call_object(obj, args, doubt, node)
            case Local():
                return self.call_local(func, args, doubt)
            case Bound(func=inner):
                return self.call_value(inner, Args(args.positional, args.keywords, unknown=True), doubt, node)
            case Choice(objs=objs, steady=steady, why=why):
                inner_doubt = doubt if steady else doubt or why or self.where("which module is called", node)
                results = [self.call_object(obj, args, inner_doubt, node) for obj in objs]
                whole = functools.reduce(lambda a, b: join(a, b, steady=steady, why=why), results)
                return whole if steady else unsteady(whole, why)
        name = ast.unparse(node.func)[:40]
        return self._handed(Known(None), args, doubt or f"it is handed to {name}(), which is not known before it runs")

    def call_object(self, obj: Any, args: Args, doubt: str | None, node: ast.Call) -> Value:
        """Calls exactly ``obj``."""
        if isinstance(obj, Local):
            return self.call_local(obj, args, doubt)
        if isinstance(obj, nn.Module):
            self.entries.call(obj, args, doubt)
            return Plain()
        if isinstance(obj, types.MethodType) and isinstance(obj.__self__, nn.Module):
            return self._module_method(obj, args, doubt, node)
        if obj is functools.partial and args.positional:
            self._keep(args.positional[1:], args.keywords, doubt)
            return Bound(args.positional[0])
        if (found := self.builtin(obj, args, doubt)) is not None:
            return found
        name = getattr(obj, "__name__", "") or ast.unparse(node.func)
        if "checkpoint" in name and args.positional and objects_of(args.positional[0]):
            inner = Args(args.positional[1:], unknown=bool(args.unknown or args.keywords))
            return self.call_value(args.positional[0], inner, doubt, node)
        if isinstance(obj, type):
            return self._constructed(obj, args)
        if carries(obj) or any(map(objects_of, args.values())):
            return self._function(obj, args, doubt, node)
        if name not in _STEADY_CALLS and (found := self._with_state(obj, args, doubt)) is not None:
            return found
        if name in _STEADY_CALLS:
            return Plain(all(value.kind for value in args.values()), True)
        return plain_from(args.values()) if _module_name(obj) == "math" else Plain()

    def _with_state(self, obj: Any, args: Args, doubt: str | None) -> Value | None:
        """A call that reaches no module, but may leave numbers in a list or an object that a condition reads later."""
        holder = getattr(obj, "__self__", None)
        held = [value.obj for value in args.values() if isinstance(value, Known) and can_change(value.obj)]
        held += [holder] if can_change(holder) else []
        if not held or is_trusted(getattr(obj, "__func__", obj)):
            return None
        if isinstance(obj, types.FunctionType | types.MethodType):
            return self.entries.follow(obj, args, doubt, owner=None) or Plain()
        if doubt is not None or not all(value.steady for value in args.values()):
            for one in held:
                self.entries.change(one)
        return None

    def _function(self, obj: Any, args: Args, doubt: str | None, node: ast.Call) -> Value:
        """A function that is given modules: read if it can be."""
        if isinstance(obj, types.FunctionType | types.MethodType):
            found = self.entries.follow(obj, args, doubt, owner=None)
            return found if found is not None else self._tainted(args, node)
        name = getattr(obj, "__name__", type(obj).__name__)
        return self._handed(Known(obj), args, doubt or f"it is handed to {name}(), whose code cannot be read", node)

    def _module_method(self, method: types.MethodType, args: Args, doubt: str | None, node: ast.Call) -> Value:
        """A method of a module: read with the module as its first argument; it enters the module only if it is its call."""
        module, function = cast(nn.Module, method.__self__), method.__func__
        if function is nn.Module.__call__:
            self.entries.enter(module, args, doubt)
            return Plain()
        if function.__name__ in _STEADY_CALLS:
            return Plain(True, True)
        if getattr(function, "__module__", "") == nn.Module.__module__:
            return self._base_method(module, function.__name__, args, doubt)
        found = self.entries.follow(function, args.bound_to(Known(module)), doubt, owner=module)
        return found if found is not None else self._tainted(args.bound_to(Known(module)), node)

    def _base_method(self, module: nn.Module, name: str, args: Args, doubt: str | None) -> Value:
        """A method that every module has."""
        first = args.positional[0] if args.positional else Plain()
        if name == "get_submodule" and isinstance(first, Known) and isinstance(first.obj, str):
            return self.attribute_path(Known(module), first.obj, doubt)
        if name in _ABOUT_MODULES:
            return Plain(False, True)
        if name in {"modules", "named_modules"}:
            return Seq(Choice(tuple(module.modules()), False, f"its parent goes over .{name}()"), True)
        self.entries.lose(module, doubt or f".{name}() is called on it while running")
        return Plain()

    def attribute_path(self, base: Value, path: str, doubt: str | None) -> Value:
        """``base.a.b.c`` for ``"a.b.c"``."""
        for part in path.split("."):
            base = self.attribute(base, part, doubt)
        return base

    def _constructed(self, cls: type, args: Args) -> Value:
        """A new object; if it holds modules, what it does with them is not followed."""
        objs = tuple(obj for value in args.values() for obj in objects_of(value))
        return Choice(objs, False, f"it is put into a {cls.__name__} while running") if objs else Plain(False, True)

    # ---- what is lost ----------------------------------------------------------------------------------------

    def _handed(self, func: Value, args: Args, why: str, node: ast.Call | None = None) -> Value:
        """Modules got into code that cannot be read."""
        for value in (func, *args.values()):
            self.entries.lose(value, why)
        return self._tainted(args, node) if node is not None else Plain()

    def _tainted(self, args: Args, node: ast.Call) -> Value:
        objs = tuple(obj for value in args.values() for obj in objects_of(value))
        return Choice(objs, False, f"it may come out of {ast.unparse(node.func)[:40]}()") if objs else Plain()

    def _keep(self, positional: tuple[Value, ...], keywords: dict[str, Value], doubt: str | None) -> None:
        for value in (*positional, *keywords.values()):
            self.entries.lose(value, doubt or "it is kept in a partial call")

    def _super_method(self, name: str) -> Any:
        """What ``super().name`` is: the method after the class in which the code that is read stands."""
        owner, code = self.owner, self.source.function.__code__
        mro = type(owner).__mro__ if owner is not None else ()
        at = next((i for i, cls in enumerate(mro) if any(_has_code(f, code) for f in vars(cls).values())), 0)
        found = next((vars(cls)[name] for cls in mro[at + 1 :] if name in vars(cls)), None)
        return types.MethodType(found, owner) if isinstance(found, types.FunctionType) else found


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _has_code(function: Any, code: types.CodeType) -> bool:
    while isinstance(function, types.FunctionType):
        if function.__code__ is code:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _module_name(obj: Any) -> str:
    return str(getattr(obj, "__module__", "") or "").partition(".")[0]
