"""Refuses compiled blocks that write buffers or inputs which backward reads again, after the first such forward.

A compiled graph recomputes in backward what is cheap, from the inputs of forward. If forward has changed them in place,
the gradients are those of another forward, without an error (torch 2.13: ``self.n += 1; y = f(x) / self.n`` under
``aot_eager``). If the block is also checkpointed (Remat), the second run is in the graph, and reads what the first has
written.

A part with its own precision gets a cast copy of its input. In-place changes to the copy are written back in eager
mode; a compiled graph cannot tell at run time whether there were any. That is known only while the graph is traced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise._torch.graphs import changed_in_graphs
from shardwise._torch.modules import BatchNormBase, is_spectral_norm
from shardwise.errors import UnsupportedError
from shardwise.model import canonical_modules
from shardwise.model.tensors import version_of


def watch_compiled(module: nn.Module, run_again: Sequence[str], compiled: Sequence[str]) -> None:
    """Registers hooks on the ``compiled`` modules that have buffers which a forward might write and read; the modules
    in ``run_again`` run a second time in backward."""
    modules = dict(canonical_modules(module))
    again = [child for name in run_again for child in modules[name].modules()]
    for block in compiled:
        target = modules[block]
        owners = {
            name: child
            for name, child in canonical_modules(target)
            if child._buffers and not _is_harmless(child, runs_again=any(child is other for other in again))
        }
        if owners:
            _watch(target, owners, block)


def watch_cast_inputs(module: nn.Module, cast: Sequence[str], compiled: Sequence[str]) -> None:
    """Registers a hook on the model that refuses modules with ``cast`` inputs in ``compiled`` blocks if they change
    their input in place."""
    modules, blocks = dict(canonical_modules(module)), tuple(f"{block}." for block in compiled)
    inside = {name: type(modules[name]) for name in cast if f"{name}.".startswith(blocks)}

    def refuse(*_: Any) -> None:
        name = next((name for name, cls in inside.items() if cls in changed_in_graphs), None)
        if name is not None:
            raise UnsupportedError(
                f"a part with a precision of its own, {inside[name].__name__}, that changes its input in place in a compiled block",
                why="it changed a cast copy, and a graph cannot tell whether to write it back: what is around would not see it",
                fix="leave the block out: Compile(targets=...); or let the part make a new tensor",
                name=name,
            )

    if inside:
        module.register_forward_hook(refuse)


def _is_harmless(module: nn.Module, *, runs_again: bool) -> bool:
    """Whether writes of its buffers do no harm: batch norm in training does not read what it writes; a spectral norm
    writes first, outside of the gradient."""
    return isinstance(module, BatchNormBase) or (not runs_again and is_spectral_norm(module))


def _watch(target: nn.Module, owners: dict[str, nn.Module], name: str) -> None:
    def versions() -> list[tuple[str, int, int]]:
        return [
            (f"{prefix}.{attr}" if prefix else attr, id(buffer), version_of(buffer))
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
