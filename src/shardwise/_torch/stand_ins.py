"""What modules show of a parameter that is not gathered, while a forward of the model runs."""

from typing import Any

import torch
from torch import Tensor


class StandIn(Tensor):
    """A shard with the dtype that it is computed in: code that reads it (``module.dtype``, a mask in the dtype of a weight)
    sees the same whether the parameter is gathered at that time or not. Everything else is the shard's.

    Args:
        shard: the parameter as it is stored.
        dtype: the one it is gathered in.
    """

    shard: Tensor

    @staticmethod
    def __new__(cls, shard: Tensor, dtype: torch.dtype) -> "StandIn":
        made = torch.empty(0, dtype=dtype, device=shard.device).as_subclass(cls)
        made.shard = shard
        made._is_param = True  # isinstance(..., nn.Parameter)
        return made

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return _dtype_of(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["shard"], name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE or getattr(func, "__name__", "").startswith("new_"):  # only dtype and device count
            first = [arg.shard if func in _LIKE else _plain(arg) for arg in args[:1] if type(arg) is StandIn] or args[
                :1
            ]
            return func(*first, *map(_plain, args[1:]), **{key: _plain(value) for key, value in kwargs.items()})
        return func(*map(_stored, args), **{key: _stored(value) for key, value in kwargs.items()})


_LIKE = (Tensor.to, Tensor.type_as)


def _dtype_of(value: StandIn) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.dtype.__get__(value)  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    return torch.empty(0, dtype=value.dtype, device=value.shard.device) if type(value) is StandIn else value


def _stored(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_stored, value))
    return value.shard if type(value) is StandIn else value
