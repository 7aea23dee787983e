"""A module's tensors by canonical name: reading them, moving them to meta, making them anew; ties are kept throughout."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.anatomy import canonical_modules, canonical_tensors

__all__ = ["give_memory", "hidden_tensors", "replace_tensors", "tensors_of", "to_meta"]


def tensors_of(module: nn.Module, kind: str) -> dict[str, Tensor]:
    """Canonical name -> parameter (``kind="_parameters"``) or buffer (``"_buffers"``), each tensor under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, owner, attr in canonical_tensors(module, kind):
        tensor = getattr(owner, kind)[attr]
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def hidden_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """``(name, owner, attribute)`` of tensors kept as plain attributes: neither parameters nor buffers, yet used."""
    for prefix, owner in canonical_modules(module):
        for attr, value in vars(owner).items():
            if isinstance(value, Tensor):
                yield (f"{prefix}.{attr}" if prefix else attr), owner, attr


def give_memory(module: nn.Module, device: torch.device, *, without: Collection[Tensor] = ()) -> None:
    """Memory on ``device`` for every tensor that is on meta, except those in ``without``; moves real ones there. Ties and,
    where it can be, identities are kept."""
    skipped = {id(tensor) for tensor in without}

    def make(tensor: Tensor) -> Tensor:
        if id(tensor) in skipped or tensor.device == device:
            return tensor
        return torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor.to(device)

    replace_tensors(module, make)


def replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Puts ``make(tensor)`` in the place of every parameter, buffer and plain tensor attribute, unless it is the same
    object; tied ones are made once and stay tied."""
    made: dict[int, Any] = {}
    kept: list[Tensor] = []  # alive until the end, so that no identity is used twice

    def new(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            kept.append(tensor)
            value = make(tensor)
            if isinstance(tensor, nn.Parameter) and value is not tensor:
                value = value.detach()
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                value.__dict__.update(vars(tensor))  # marks a library left on a parameter, such as "no weight decay"
            made[id(tensor)] = value
        return made[id(tensor)]

    for kind in ("_parameters", "_buffers"):
        for _, owner, attr in list(canonical_tensors(module, kind)):
            getattr(owner, kind)[attr] = new(getattr(owner, kind)[attr])
    for _, owner, attr in list(hidden_tensors(module)):
        object.__setattr__(owner, attr, new(getattr(owner, attr)))


def to_meta(module: nn.Module) -> None:
    """Drops all values of ``module``, keeping shapes, dtypes, ties and marks."""
    replace_tensors(module, lambda tensor: torch.empty_like(tensor, device="meta"))
