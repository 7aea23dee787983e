"""Collectives as operators, which ``torch.compile`` can trace and which return new tensors."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


def group_name(group: Any) -> str:
    """The name by which operators know a process group."""
    return str(group.group_name)


def group_of(func: Any, args: Sequence[Any]) -> Any:
    """The process group of a collective, by the arguments that its operator is called with; None: it has none, as one that waits."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "group_name":
            return _resolve_process_group(value)
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
    return None


def sum_over(tensor: Tensor, group: str) -> Tensor:
    """The sum of ``tensor`` over the ranks of a group: a new tensor of its shape."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(tensor.contiguous(), "sum", group))


def max_over(tensor: Tensor, group: str) -> Tensor:
    """The largest of each number of ``tensor`` over the ranks of a group: a new tensor of its shape."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(tensor.contiguous(), "max", group))


def gather_over(tensor: Tensor, group: str, size: int) -> Tensor:
    """The tensors of all ``size`` ranks of a group, one behind the other along dim 0: a new tensor."""
    operators = torch.ops._c10d_functional
    if tensor.is_cuda and _is_gloo(group, tensor.device):  # which crashes on them, though it can sum them
        return gather_over(tensor.cpu(), group, size).to(tensor.device)
    return operators.wait_tensor(operators.all_gather_into_tensor(tensor.contiguous(), size, group))


def scatter_sum_over(tensor: Tensor, group: str, size: int) -> Tensor:
    """This rank's part, of ``size`` even ones along dim 0, of the sum of ``tensor`` over the ranks of a group: a new tensor."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.reduce_scatter_tensor(tensor.contiguous(), "sum", size, group))


def swap_over(tensor: Tensor, group: str, size: int) -> Tensor:
    """Part i of ``size`` even ones along dim 0 of what rank i has for this rank, for all i: a new tensor of the same shape."""
    operators = torch.ops._c10d_functional
    parts = [tensor.shape[0] // size] * size
    return operators.wait_tensor(operators.all_to_all_single(tensor.contiguous(), parts, parts, group))


@torch.compiler.assume_constant_result
def _is_gloo(group: str, device: torch.device) -> bool:
    return _resolve_process_group(group)._get_backend(device).name() == "gloo"  # type: ignore[attr-defined]
