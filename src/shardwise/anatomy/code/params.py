"""How the arguments of a call land in the parameters of the function that is read."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardwise.anatomy.code.abstract import KwArgs, Plain, Value, VarArgs

__all__ = ["Args", "bind"]


@dataclass(frozen=True)
class Args:
    """What a call gives.

    Attributes:
        outside: more keywords may come from the caller of the whole module: the batch, and flags.
        unknown: more may come from anywhere.
    """

    positional: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    outside: bool = False
    unknown: bool = False

    def bound_to(self, first: Value) -> "Args":
        """The same call as of a method of ``first``."""
        return replace(self, positional=(first, *self.positional))

    def values(self) -> Iterator[Value]:
        """Every value given."""
        yield from self.positional
        yield from self.keywords.values()

    def key(self) -> tuple:
        """Equal for calls that a forward cannot tell apart, as far as steadiness goes."""
        named = tuple(sorted((name, value.steady, value.kind) for name, value in self.keywords.items()))
        return (tuple((v.steady, v.kind) for v in self.positional), named, self.outside, self.unknown)


def bind(arguments: ast.arguments, args: Args) -> dict[str, Value]:
    """Parameter name -> what is known about it at the start of the function."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(zip([a.arg for a in positional[::-1]], arguments.defaults[::-1], strict=False))
    defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    rest = dict(args.keywords)
    env: dict[str, Value] = {}
    for i, argument in enumerate((*positional, *arguments.kwonlyargs)):
        name = argument.arg
        if i < len(positional) and i < len(args.positional):
            env[name] = args.positional[i]
        elif name in rest:
            env[name] = rest.pop(name)
        else:
            env[name] = _missing(argument, defaults.get(name), args)
    if arguments.vararg is not None:
        more = VarArgs(args.positional[len(positional) :], outside=args.outside)
        env[arguments.vararg.arg] = Plain(False, True) if args.unknown else more
    if arguments.kwarg is not None:
        env[arguments.kwarg.arg] = Plain() if args.unknown else KwArgs(given=tuple(rest.items()), outside=args.outside)
    return env


def _missing(argument: ast.arg, default: ast.expr | None, args: Args) -> Value:
    """A parameter that the call does not name."""
    if args.unknown:
        return Plain()
    if not args.outside:
        return Plain(True, True) if isinstance(default, ast.Constant) else Plain(False, True)
    # From the caller of the whole module: flags are given alike on every rank, numbers and tensors come with the batch.
    flag = isinstance(default, ast.Constant) and isinstance(default.value, bool | str)
    none = default is None or (isinstance(default, ast.Constant) and default.value is None)
    flag = flag or (none and argument.annotation is not None and _is_flag_type(argument.annotation))
    return Plain(flag, True)


def _is_flag_type(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return False
    words = {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(annotation) if isinstance(n, ast.Attribute)}
    return bool(words & {"bool", "str"}) and words <= {"bool", "str", "Optional", "Union", "typing", "None"}
