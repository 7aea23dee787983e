"""Operators of torch: their names, whether they decompose, and ``_foreach`` operators over lists of tensors."""

from typing import Any

import torch
from torch import Tensor


def looked_at_on_meta(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The meta tensor whose values ``op`` is about to read (``.item()``, ``bool()``, ``.tolist()``, ``.cpu()``), if
    any."""
    leaves = op is torch.ops.aten._local_scalar_dense.default or (
        op is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu"
    )
    return args[0] if leaves and args[0].device.type == "meta" else None


def foreach_norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The p-norm of each tensor, stacked, computed in ``dtype``."""
    return torch.stack(list(torch._foreach_norm(tensors, norm_type, dtype=dtype)))


def foreach_scale(tensors: list[Tensor], factor: float) -> None:
    """Multiplies each tensor by ``factor``, in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_copy(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each of ``sources`` into the tensor at its place."""
    torch._foreach_copy_(tensors, sources)


def operator_names() -> list[str]:
    """The names of torch's own (``aten``) operators, without overloads."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    return sorted(name.removeprefix("aten::") for name in names)


def is_taken_apart(operator: Any) -> bool:
    """Whether autograd and lower dispatch keys see other operators in place of this one (it decomposes)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
