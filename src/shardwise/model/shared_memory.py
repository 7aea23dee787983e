"""Parameters that share memory with another tensor and are not the same object: ``b.weight.data = a.weight.data``, a buffer that is a view."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.model.tensors import hidden_tensors, tensors_of


class Region(NamedTuple):
    """Where elements of a tensor lie: from byte ``start`` to ``end`` of a memory.

    Attributes:
        memory: a device; without values, on meta, one storage.
        kind: "parameter", "buffer" or "attribute".
        name: of the tensor.
        tensor: it.
    """

    memory: str
    start: int
    end: int
    kind: str
    name: str
    tensor: Tensor


def overlapping(module: nn.Module) -> tuple[Region, Region] | None:
    """A parameter, and another tensor or array that shares elements with it; None: there are none. Parameters that lie side by side in one
    memory, as those of a mapped file or of an LSTM do, share none."""
    regions = sorted(_regions(module), key=lambda region: region[:2])
    for i, one in enumerate(regions):
        for other in regions[i + 1 :]:
            if other.memory != one.memory or other.start >= one.end:
                break
            param, beside = (one, other) if one.kind == "parameter" else (other, one)
            if param.kind == "parameter" and not _is_recomputed(param, beside) and _share_elements(one, other):
                return param, beside
    return None


def _is_recomputed(param: Region, beside: Region) -> bool:
    """Whether ``beside`` is an attribute that torch's old ``spectral_norm`` or ``prune`` computes from ``weight_orig`` in each forward."""
    return beside.kind == "attribute" and param.name == f"{beside.name}_orig"


def _regions(module: nn.Module) -> Iterator[Region]:
    seen: set[int] = set()
    for kind, tensors in {
        "parameter": list(tensors_of(module, "_parameters").items()),
        "buffer": list(tensors_of(module, "_buffers").items()),
        "attribute": [(hidden.name, hidden.tensor) for hidden in hidden_tensors(module)],
    }.items():
        for name, tensor in tensors:
            if id(tensor) not in seen and _has_memory(tensor):
                yield _region(kind, name, tensor)
            seen.add(id(tensor))
    for hidden in hidden_tensors(module, np.ndarray):
        array: Any = hidden.tensor
        steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        start = array.__array_interface__["data"][0] + sum(step for step in steps if step < 0)
        num = sum(map(abs, steps)) + array.itemsize if array.size else 0
        flat = torch.empty(num, dtype=torch.uint8, device="meta")  # its range alone is looked at
        yield Region("cpu", start, start + num, "attribute", hidden.name, flat)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not hasattr(tensor, "__tensor_flatten__")


def _region(kind: str, name: str, tensor: Tensor) -> Region:
    if tensor.untyped_storage().device.type == "meta":  # also of a fake tensor
        memory, start = (
            f"storage {tensor.untyped_storage()._cdata}",
            int(tensor.storage_offset()) * tensor.element_size(),
        )
    else:
        memory, start = str(tensor.device), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Region(memory, start, start + (last + 1) * tensor.element_size(), kind, name, tensor)


def _share_elements(one: Region, other: Region) -> bool:
    """Whether tensors whose ranges overlap share an element: the even and the odd columns of a matrix do not."""
    size = one.tensor.element_size()
    apart = other.start - one.start
    has_gaps = any(each.end - each.start != each.tensor.nbytes for each in (one, other))
    if not has_gaps or other.tensor.element_size() != size or apart % size:
        return True
    marks = torch.zeros((max(one.end, other.end) - one.start) // size, dtype=torch.bool, device="cpu")
    marks.as_strided(one.tensor.shape, one.tensor.stride()).fill_(True)
    return bool(marks.as_strided(other.tensor.shape, other.tensor.stride(), apart // size).any())
