"""DTensors over memory that is there."""

from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["cut_like", "forget_meshes"]


def cut_like(local: Tensor, other: DTensor) -> DTensor:
    """``local`` as this rank's part of a tensor that is cut as ``other`` is, over the same memory, wherever it is.

    ``DTensor.from_local`` moves it to the device of the mesh: of a parameter that is offloaded, state would come to the device, where
    the optimizer does not step.
    """
    meta = TensorMeta(other.shape, other.stride(), local.dtype)
    return DTensor(
        local.detach(), DTensorSpec(other.device_mesh, other.placements, tensor_meta=meta), requires_grad=False
    )


def forget_meshes() -> None:
    """Forgets what torch keeps of results of operators on DTensors. It takes meshes of the same ranks for one, so results in a new
    world would lie on a mesh of the one before, whose groups are gone."""
    # As torch.distributed.tensor.debug does it, whose import brings the compiler along: a second of every rank's start.
    with suppress(AttributeError):
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    with suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()
