"""Functions that a module keeps, such as minGPT's ``self.mlpf = lambda x: ...``, and what they use: a copy of the module needs
copies of them, which ``copy.deepcopy`` does not make, and a parameter that they use cannot be replaced."""

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def rebind_functions(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Replaces functions that modules of a copy keep by ones that use the copy, where they use modules or tensors of the original.

    Args:
        copied: changed in place.
        memo: id of an object of the original -> its copy, as ``copy.deepcopy`` fills it.
    """
    for module in copied.modules():
        for kept, key, function in _kept(module):
            kept[key] = rebound(function, memo)


def functions_with_parameters(module: nn.Module) -> dict[int, str]:
    """Id of a parameter that a kept function uses by itself, not through its module -> the function's name."""
    found: dict[int, str] = {}
    for name, child in module.named_modules():
        for _, key, function in _kept(child):
            for value in (*map(_content, function.__closure__ or ()), *(function.__defaults__ or ())):
                if isinstance(value, nn.Parameter):
                    shown = key if isinstance(key, str) else function.__name__  # hooks have numbers
                    found[id(value)] = f"{name}.{shown}" if name else shown
    return found


def _kept(module: nn.Module) -> Iterator[tuple[dict[Any, Any], Any, types.FunctionType]]:
    """The functions in attributes and forward hooks of a module, each with the dict and the key that have it."""
    for kept in (vars(module), *(vars(module).get(name) or {} for name in _HOOKS)):
        for key, value in list(kept.items()):
            if isinstance(value, types.FunctionType):
                yield kept, key, value


def rebound(function: types.FunctionType, memo: Mapping[int, Any]) -> Callable[..., Any]:
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    before = [*map(_content, cells), *defaults]
    after = [memo.get(id(value), value) if isinstance(value, nn.Module | Tensor) else value for value in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return function
    new = tuple(
        cell if value is _content(cell) else types.CellType(value) for cell, value in zip(cells, after, strict=False)
    )
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, tuple(after[len(cells) :]) or None, new or None
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
