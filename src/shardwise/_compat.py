"""The only file that touches private names of torch; each with what it is for, checked against torch 2.13."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP as DDPModule  # the class replicate() puts over a module's own
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "DDPModule",
    "default_store",
    "drop_partial_gradients",
    "is_fake",
    "local_tensor",
    "on_unit_backward",
    "replicate",
    "unit_gradients",
    "unit_groups",
]


def default_store() -> dist.Store:
    """The store of the default process group: a peer can leave word there while its main thread is blocked."""
    return dist.distributed_c10d._get_default_store()


def unit_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of one unit: the objects that gather and reduce."""
    if not isinstance(module, FSDPModule):
        return []
    return list(module._get_fsdp_state()._fsdp_param_groups)


def on_unit_backward(group: Any, seen: Callable[[list[int]], None]) -> None:
    """Calls ``seen`` at the end of every backward of ``group`` with the positions of its parameters that got a
    gradient in it: after reduction FSDP2 can no longer tell 'used, zero' from 'not used'."""
    post_backward = group.post_backward

    def wrapped(*args: Any) -> None:
        used = []
        for i, param in enumerate(group.fsdp_params):
            full = getattr(param, "_unsharded_param", None)
            if full is not None and full.grad is not None:
                used.append(i)
        seen(used)
        post_backward(*args)

    group.post_backward = wrapped


def unit_gradients(group: Any) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
    """``(sharded parameter, owning module, attribute)`` of a group, in the order :func:`on_unit_backward` counts."""
    for param in group.fsdp_params:
        info = param._module_info
        yield param.sharded_param, info.module, info.param_name


def drop_partial_gradients(group: Any) -> None:
    """Forgets gradients of micro-batches whose reduction never came (a window that ended in an exception)."""
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        full = getattr(param, "_unsharded_param", None)
        if full is not None:
            full.grad = None


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor without values (meta)."""
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, without the autograd work of ``to_local``; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
