"""Runs code that asks for float32 in float64 instead, so that its rounding does not limit a comparison.

Norms, rotary tables and losses of Hugging Face models compute in float32 whatever the model's dtype. With an allowed
error of 1e-12 that alone would hide every difference; lifted, both sides are float64 from end to end.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["LiftFloat32"]

_WIDER = {Tensor.float: torch.float64, getattr(Tensor, "cfloat"): torch.complex128}  # noqa: B009 - missing in torch's type stubs


class LiftFloat32(TorchFunctionMode):
    """Within: ``.float()``, ``.to(torch.float32)`` and ``dtype=torch.float32`` mean float64, complex64 means
    complex128."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WIDER:
            return args[0].to(_WIDER[func])
        args = tuple(_lifted(x) for x in args)
        return func(*args, **{key: _lifted(x) for key, x in (kwargs or {}).items()})


def _lifted(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value
