"""Compiled blocks that write buffers in forward, refused by name after the first forward that shows it.

A compiled graph computes again in backward what is cheap, from what forward was given; where forward has changed that in
place, gradients are those of another forward, without an error (torch 2.13: ``self.n += 1; y = f(x) / self.n`` under
``aot_eager``). Where the block also runs again (Remat), the second run is in the graph, and reads what the first has written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise._compat import BatchNormBase, is_spectral_norm
from shardwise.anatomy import canonical_modules
from shardwise.errors import UnsupportedError
from shardwise.recipe import Edit

__all__ = ["watch_compiled"]


def watch_compiled(module: nn.Module, remat: Sequence[Edit], compiled: Sequence[Edit]) -> None:
    """Puts hooks on the compiled modules that have buffers which a forward might write and read."""
    modules = dict(canonical_modules(module))
    again = [child for edit in remat for child in modules[edit.module].modules()]
    for edit in compiled:
        target = modules[edit.module]
        owners = {
            name: child
            for name, child in canonical_modules(target)
            if child._buffers and not _is_harmless(child, runs_again=any(child is other for other in again))
        }
        if owners:
            _watch(target, owners, edit.module)


def _is_harmless(module: nn.Module, *, runs_again: bool) -> bool:
    """Batch norm in training does not read what it writes; a spectral norm writes first, outside of the gradient."""
    return isinstance(module, BatchNormBase) or (not runs_again and is_spectral_norm(module))


def _watch(target: nn.Module, owners: dict[str, nn.Module], name: str) -> None:
    def versions() -> list[tuple[str, int, int]]:
        return [
            (f"{prefix}.{attr}" if prefix else attr, id(buffer), buffer._version)
            for prefix, owner in owners.items()
            for attr, buffer in owner._buffers.items()
            if buffer is not None
        ]

    before: list[list[tuple[str, int, int]]] = []

    def note(*_: Any) -> None:
        before.append(versions())

    def compare(*_: Any) -> None:
        earlier = before.pop()
        written = next((old[0] for old, new in zip(earlier, versions(), strict=False) if old != new), None)
        if written is not None and torch.is_grad_enabled():
            raise UnsupportedError(
                f"a compiled block that writes its buffer {written!r} in forward",
                why="backward computes parts of it again, and would read what forward has written: other gradients, no error",
                fix="leave the block out: Compile(targets=...)",
                name=name,
            )

    target.register_forward_pre_hook(note)
    target.register_forward_hook(compare)
