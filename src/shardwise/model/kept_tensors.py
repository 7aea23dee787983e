"""Tensors that a forward may write, with the values that they had, and the parts that hold them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import unseen
from shardwise.model.mutable import content_of, is_same, items_of, put
from shardwise.model.tensors import bytes_of, same_bytes, version_of, write_values


class KeptTensor:
    """A tensor, and the value it had. ``of_torch``: a layer of torch has it, which keeps nothing beside it."""

    def __init__(self, tensor: Tensor, *, of_torch: bool = False):
        self.tensor, self.of_torch = tensor, of_torch
        self._version, self.value = version_of(tensor), tensor.detach().clone()

    @property
    def shows_change(self) -> bool:
        """Whether the tensor was written, as far as that shows without a look at its values."""
        now = self.tensor
        return version_of(now) != self._version or now.shape != self.value.shape or now.dtype != self.value.dtype

    def restore(self) -> None:
        write_values(self.tensor, self.value)
        self._version = version_of(self.tensor)


def written_keys(values: dict[int, KeptTensor]) -> set[int]:
    """Keys of the tensors that were written. Batch norm's kernels, and writes to ``.data``, do not change a version. Those on a device
    are read together."""
    found = {key for key, value in values.items() if value.shows_change}
    away: list[int] = []
    for key, value in values.items():
        if key in found or value.tensor.is_meta:
            continue
        if value.tensor.is_cpu:
            if not same_bytes(value.tensor, value.value):
                found.add(key)
        elif value.of_torch:
            found.add(key)
        else:
            away.append(key)
    for device in {values[key].tensor.device for key in away}:
        keys = [key for key in away if values[key].tensor.device == device]
        flags = torch.stack([(bytes_of(values[key].tensor) != bytes_of(values[key].value)).any() for key in keys])
        found |= {key for key, flag in zip(keys, flags.tolist(), strict=True) if flag}
    return found


def restore_parts(parts: Iterable[tuple[Any, Any]], tensors: dict[int, KeptTensor]) -> None:
    """Puts back the content of parts, and the values of tensors, that have changed."""
    for part, content in parts:
        if not is_same(content_of(part), content):
            put(part, content)
    with unseen():
        changed = written_keys(tensors)
    for key in changed:
        tensors[key].restore()


def loose_tensors(parts: Iterable[tuple[Any, Any]], attributes: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that are attributes, or in a part, and not parameters."""
    found: dict[int, Tensor] = {}
    for content in (attributes, *(content for _, content in parts)):
        for value in items_of(content):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad:
                found[id(value)] = value
    return iter(found.values())
