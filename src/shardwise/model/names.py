"""Canonical names: the name of a tensor in the user's unsharded module, without the wrappers around it."""

import traceback
from collections.abc import Iterator
from typing import Any

from torch import nn

# The attribute under which a wrapper class of torch keeps the wrapped module: torch.compile, activation checkpointing,
# DDP. Looked up by class, not by attribute name: a user's own module may well be called "module".
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
}


_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, children, hooks, the mode


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that the user's class, or Shardwise, has given it."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def inner_module(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper wraps; None for a module that is not a wrapper."""
    kind = type(module)
    attr = _WRAPPERS.get(kind.__name__)
    return module._modules.get(attr) if attr is not None and kind.__module__.startswith("torch.") else None


def unwrap_module(module: nn.Module) -> nn.Module:
    """The user's module inside any torch.compile, activation checkpointing or DDP wrappers."""
    while (inner := inner_module(module)) is not None:
        module = inner
    return module


def canonical_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(attribute, child)`` of the direct children, without wrappers around them; a child once per attribute."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, unwrap_module(child)


def canonical_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under its canonical name, without wrappers; each (name, module) pair once per name. A module's children
    are looked up when the walk leaves it: those that the caller puts in place of them later are not visited."""
    # A stack, not a generator within a generator: each name would pass through all levels above it.
    waiting: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", unwrap_module(root), ())]
    while waiting:
        prefix, module, above = waiting.pop()
        yield prefix, module
        if not module._modules:
            continue
        below, start = (*above, id(module)), f"{prefix}." if prefix else ""
        children = []
        for name, child in module._modules.items():
            if child is not None and type(child).__name__ in _WRAPPERS:  # else a call for each module: most of the walk
                child = unwrap_module(child)
            if child is not None and id(child) not in above:
                children.append((start + name, child, below))
        waiting += reversed(children)


def canonical_tensors(root: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module, str]]:
    """``(canonical name, owning module, attribute)`` of every parameter or buffer, aliases included."""
    for prefix, module in canonical_modules(root):
        for attr, tensor in getattr(module, kind).items():
            if tensor is not None:
                yield (f"{prefix}.{attr}" if prefix else attr), module, attr


def canonical_name(root: nn.Module, name: str) -> str:
    """The canonical form of a run-time name such as ``_orig_mod.blocks.0._checkpoint_wrapped_module.weight``."""
    kept: list[str] = []
    module: nn.Module | None = root
    for part in name.split("."):
        below = module._modules.get(part) if module is not None else None
        if below is None or below is not inner_module(module):  # type: ignore[arg-type]
            kept.append(part)
        module = below
    return ".".join(kept)


def module_of_error(root: nn.Module, error: BaseException) -> str | None:
    """Canonical name of the module below ``root`` in whose own code ``error`` was raised; None if there is none, or it
    is the root."""
    names = {id(module): name for name, module in canonical_modules(root)}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = (names.get(id(frame.f_locals.get("self"))) for frame in reversed(frames))
    return next((name for name in found if name is not None), None) or None
