"""Runs code that asks for float32 in float64 instead, so that its rounding does not limit a comparison.

Norms, rotary tables and losses of Hugging Face models compute in float32 whatever the model's dtype. With an allowed
error of 1e-12 that alone would hide every difference; lifted, both sides are float64 from end to end.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER = {Tensor.float: torch.float64, getattr(Tensor, "cfloat"): torch.complex128}  # noqa: B009 - missing in torch's type stubs

_NARROW = (Tensor.half, Tensor.bfloat16)


class LiftFloat32(TorchFunctionMode):
    """Within: ``.float()``, ``.to(torch.float32)`` and ``dtype=torch.float32`` mean float64, complex64 means
    complex128."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, kwargs = lifted(func, args, kwargs or {})
        return func(*args, **kwargs)


def lifted(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, narrow: bool = False
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of a function that takes the place of one that asks for float32; ``narrow``: or for bfloat16 or float16."""
    if func in _WIDER:
        return Tensor.to, (args[0], _WIDER[func]), {}
    if narrow and func in _NARROW:
        return Tensor.to, (args[0], torch.float64), {}
    if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dtype == torch.float64:
        return _grouped_mm, args, kwargs
    for value in (*args, *kwargs.values()) if kwargs else args:  # no generator: of each function that a model calls
        if value is _FLOAT or value is _COMPLEX or (narrow and (value is _HALF or value is _BFLOAT)):
            wider = _widest if narrow else _wider
            return func, tuple(map(wider, args)), {key: wider(value) for key, value in kwargs.items()}
    return func, args, kwargs


_FLOAT, _COMPLEX, _HALF, _BFLOAT = torch.float32, torch.complex64, torch.float16, torch.bfloat16


def _widest(value: Any) -> Any:
    return torch.float64 if value is _HALF or value is _BFLOAT else _wider(value)


def _wider(value: Any) -> Any:
    if value is _FLOAT:
        return torch.float64
    return torch.complex128 if value is _COMPLEX else value


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """``torch.nn.functional.grouped_mm``, the product of experts in Hugging Face models, which torch does not have for float64:
    see there. Rows beyond the last group are zeros."""
    if offs is None:
        y = a @ b
    else:
        groups = list(itertools.pairwise([0, *offs.tolist()]))
        if a.dim() == b.dim():
            y = torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])
        elif a.dim() == 2:
            rest = a.new_zeros(a.shape[0] - groups[-1][1], b.shape[-1])
            y = torch.cat([*(a[start:end] @ b[i] for i, (start, end) in enumerate(groups)), rest])
        else:
            rest = b.new_zeros(a.shape[1], b.shape[1] - groups[-1][1])
            y = torch.cat([*(a[i] @ b[:, start:end] for i, (start, end) in enumerate(groups)), rest], 1)
    return y if bias is None else y + bias
