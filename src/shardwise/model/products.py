"""Products of tensors, of which attention that a module writes out itself is made: its scores are queries times keys, its results weights
times values. In both the second factor has what a query looks at, so it is the one of which a rank with some rows needs all positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SECOND: dict[Any, tuple[str, int]] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), ("other", 1)),
    **dict.fromkeys((torch.bmm, Tensor.bmm), ("mat2", 1)),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), ("batch2", 2)),
}

Products = list[list[Any]]
"""Products in a module's own code whose second factor is gathered: ``[place, dim]`` each, by the place of the call in the code."""


def dim_of(products: Products, place: str) -> int | None:
    """The dim along which the second factor of a product is gathered; None: it is not."""
    return next((dim for at, dim in products if at == place), None)


def is_product(func: Any) -> bool:
    """Whether a function multiplies two tensors, and sums over a dim of both."""
    return func in _SECOND or func is torch.einsum


def second_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The second factor of a product; None: it is not given as one tensor."""
    if func is torch.einsum:
        factors = _factors(args)
        return factors[1] if len(factors) == 2 else None
    name, at = _SECOND[func]
    return args[at] if len(args) > at else kwargs.get(name)


def with_second(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], factor: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if func is torch.einsum:
        return (args[0], _factors(args)[0], factor), dict(kwargs)
    name, at = _SECOND[func]
    if len(args) > at:
        return (*args[:at], factor, *args[at + 1 :]), dict(kwargs)
    return args, {**kwargs, name: factor}


def _factors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    factors = args[1:]
    return tuple(factors[0]) if len(factors) == 1 and isinstance(factors[0], (list, tuple)) else factors
