"""DTensors: the local piece of a rank, Python numbers read from a DTensor, DTensors over existing memory."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from shardwise._torch.patches import patch


def cut_like(local: Tensor, other: DTensor) -> DTensor:
    """A DTensor with the mesh and placements of ``other``, whose local piece is ``local``: same memory, same device.

    ``DTensor.from_local`` would move ``local`` to the device of the mesh. For an offloaded parameter, optimizer state
    would then be on the accelerator, where the optimizer does not step.
    """
    meta = TensorMeta(other.shape, other.stride(), local.dtype)
    return DTensor(
        local.detach(), DTensorSpec(other.device_mesh, other.placements, tensor_meta=meta), requires_grad=False
    )


def forget_meshes() -> None:
    """Clears torch's cache of sharding results of DTensor operators. Its keys take meshes over the same ranks as equal,
    so results in a new world would be on a mesh of the previous world, whose process groups no longer exist."""
    # torch.distributed.tensor.debug does this too, but importing it imports the compiler: a second of each rank's start
    with suppress(AttributeError):
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    with suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's local piece of a DTensor, without the autograd work of ``to_local``; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def cuts_of(tensor: DTensor | DTensorSpec) -> list[bool]:
    """For each dim of its mesh: ranks along it have other values."""
    return [n > 1 and not p.is_replicate() for n, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True)]


@contextmanager
def without_handler(op: Any) -> Iterator[None]:
    """torch runs ``op`` by itself. A view that another thread makes meanwhile is not marked."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op, None)
    try:
        yield
    finally:
        if handler is not None:
            handlers[op] = handler


_on_scalar_read = WeakIdKeyDictionary()  # root of a mesh -> the function to call


def on_scalar_read(mesh: DeviceMesh, call: Callable[[DTensor], None]) -> None:
    """Calls ``call`` with a DTensor before a Python number is taken from it, if it is over ``mesh`` or a part of it.

    Covers ``item()``, ``float()``, ``bool()`` and a scalar argument of an operator, which torch reads from this rank's
    piece; also formatting, ``tolist()`` and ``numpy()``, whose own errors do not say what to do. DTensors over other
    meshes are read as before.
    """
    handlers, read = DTensor._op_dispatcher._custom_op_handlers, torch.ops.aten._local_scalar_dense.default
    if not _on_scalar_read:
        handlers[read] = _scalar_reader(handlers.get(read))
        for name in ("__format__", "tolist", "numpy"):
            _call_before(name)
    _on_scalar_read[mesh._get_root_mesh()] = call


def _scalar_reader(before: Callable[..., Any] | None) -> Callable[..., Any]:
    if getattr(before, "is_ours", False):
        return before  # type: ignore[return-value]

    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        call = _on_scalar_read.get(tensor.device_mesh._get_root_mesh())
        if call is not None:
            call(tensor)
        if before is not None:
            return before(op, args, kwargs)
        return op(tensor._local_tensor) if tensor.device_mesh.get_coordinate() is not None else None

    read.is_ours = True  # type: ignore[attr-defined]
    return read


def _call_before(name: str) -> None:
    method = getattr(DTensor, name)

    @functools.wraps(method)
    def read(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        call = _on_scalar_read.get(tensor.device_mesh._get_root_mesh())
        if call is not None and args != ("",):  # f"{x}" is printing
            call(tensor)
        return method(tensor, *args, **kwargs)

    read.is_ours = True  # type: ignore[attr-defined]
    if not getattr(method, "is_ours", False):
        patch(DTensor, name, read, "refuses to read numbers of this rank's piece of a parameter")
