"""Runs code that insists on float32 in float64 instead, so that a comparison is not limited by its islands.

Hugging Face norms, rotary tables and losses compute in float32 whatever the model's dtype. At the gate of 1e-12 that alone
would hide every difference; lifted, both sides are float64 from end to end.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["LiftFloat32"]


class LiftFloat32(TorchFunctionMode):
    """Within: ``.float()``, ``.to(torch.float32)`` and ``dtype=torch.float32`` mean float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return func(*args, **{key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()})
