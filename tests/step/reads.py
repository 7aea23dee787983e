"""Counts reads of a device by the host, on a CPU that is taken for one: the memory of the model, and all that is computed from it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise._torch import reads as ours
from shardwise._torch.dtensor import local_tensor
from shardwise.world import agreement

_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "allclose", "masked_select", "unique"}
_METHODS = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.item}


class Device:
    """Which memory is the device's.

    Attributes:
        found: where it was read, one line for each read.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._held: dict[int, StorageWeakRef] = {}

    def put(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            reference = StorageWeakRef(local_tensor(tensor).untyped_storage())
            self._held[reference.cdata] = reference

    def has(self, values: Any) -> bool:
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.layout is torch.strided]
        return any(local_tensor(x).untyped_storage()._cdata in self._held for x in tensors)

    def read(self, what: str) -> None:
        self.found.append(what)


class _Operators(TorchDispatchMode):
    """What comes of the device's memory is the device's, and what is written with it."""

    def __init__(self, device: Device):
        super().__init__()
        self.device, self.is_within = device, False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_of_device = self.device.has((args, kwargs))
        if is_of_device and func.overloadpacket.__name__ in _READS and not self.is_within:
            self.device.read(str(func))
        result = func(*args, **kwargs)
        if is_of_device:
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self.device.put(*(x for x in tree_leaves((result, written, kwargs.get("out"))) if isinstance(x, Tensor)))
        return result


class _Methods(TorchFunctionMode):
    """Methods that read memory without an operator, and copies to the CPU, which are none on it."""

    def __init__(self, device: Device, operators: _Operators):
        super().__init__()
        self.device, self.operators = device, operators

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_cpu = func is Tensor.to and "cpu" in [x for x in (*args[1:], *kwargs.values()) if isinstance(x, str)]
        if not (func in _METHODS or to_cpu) or not self.device.has(args[:1]):
            return func(*args, **kwargs)
        self.device.read(func.__name__)
        self.operators.is_within = True
        try:
            return func(*args, **kwargs)
        finally:
            self.operators.is_within = False


@contextmanager
def reads_of(device: Device) -> Iterator[list[str]]:
    """Within: reads of the device are noted in the list that it gives."""

    def on_host(tensors: Any) -> list[Tensor]:
        if not device.has(list(tensors)):
            return ours.on_host(tensors)
        device.read("together")
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return [tensor.detach().reshape(-1).clone() for tensor in tensors]

    device.found.clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(agreement, "on_host", on_host))
        operators = stack.enter_context(_Operators(device))
        stack.enter_context(_Methods(device, operators))
        yield device.found
