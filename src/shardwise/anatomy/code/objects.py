"""Python objects met while code is read: which modules can be reached through them."""

import functools
import types
from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor, nn

from shardwise.anatomy.names import inner_module

__all__ = [
    "can_change",
    "carries",
    "cells_of",
    "children_of",
    "distinct",
    "held_by",
    "identity",
    "is_of_a_rank",
    "unwrap_module",
]

_INERT = (Tensor, str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, nn.ParameterList)


def unwrap_module(module: Any) -> Any:
    """The user's module inside a compile or activation-checkpointing wrapper."""
    while isinstance(module, nn.Module) and (inner := inner_module(module)) is not None:
        module = inner
    return module


def identity(obj: Any) -> Hashable:
    """Equal for one object met twice. A method is bound anew each time that it is read from its object."""
    return (id(obj.__self__), id(obj.__func__)) if isinstance(obj, types.MethodType) else id(obj)


def distinct(objs: Iterable[Any]) -> tuple[Any, ...]:
    """``objs`` in their order, each once."""
    return tuple({identity(obj): obj for obj in objs}.values())


def carries(obj: Any, depth: int = 3) -> bool:
    """Whether code that is given ``obj`` could reach a module through it; looks ``depth`` objects far."""
    if isinstance(obj, nn.Module):
        return True
    if depth == 0 or isinstance(obj, _INERT):
        return False
    return any(carries(value, depth - 1) for value in held_by(obj))


def held_by(obj: Any) -> list[Any]:
    """What ``obj`` holds: elements, attributes, what a method or a nested function is bound to."""
    if isinstance(obj, types.MethodType):
        return [obj.__self__]
    if isinstance(obj, functools.partial):
        return [obj.func, *obj.args, *obj.keywords.values()]
    if isinstance(obj, types.FunctionType):
        return list(cells_of(obj).values())
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, list | tuple | set | frozenset):
        return list(obj)
    return list(getattr(obj, "__dict__", {}).values())


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Names that ``function`` takes from the functions around it, with their values."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells if name != "__class__" and _is_filled(cell)}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if empty
    except ValueError:
        return False
    return True


def children_of(obj: Any) -> list[Any]:
    """What iterating over a container of modules gives; for a dict, its values."""
    obj = unwrap_module(obj)
    if isinstance(obj, nn.Module):
        return [unwrap_module(child) for child in obj.children()]
    if isinstance(obj, dict):
        return list(obj.values())
    return list(obj) if isinstance(obj, list | tuple | set | frozenset) else []


def can_change(obj: Any) -> bool:
    """Whether code that is given ``obj``, which is no module, could leave something in it: a list, a dict, an object of
    the user's own."""
    if isinstance(obj, (*_INERT, nn.Module, types.FunctionType, types.MethodType, tuple, frozenset)):
        return False
    return isinstance(obj, list | dict | set) or hasattr(obj, "__dict__")


def is_of_a_rank(name: str) -> bool:
    """Whether a name says that its value differs by rank, whatever it is."""
    return name.lower().strip("_") in _OF_A_RANK


_OF_A_RANK = {
    "rank",
    "local_rank",
    "global_rank",
    "node_rank",
    "dp_rank",
    "is_main",
    "is_main_process",
    "is_master",
    "is_rank0",
}
