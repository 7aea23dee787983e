"""What is stored of a model; its modules may answer for their state themselves (:mod:`shardwise.model.own_state`).

Most entries of a state dict are tensors of the model, written piece by piece. What a method computes needs its tensors in
full: it is computed on rank 0, a group of tensors at a time.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.model import dtype_name, dtype_of
from shardwise.model.own_state import OwnState
from shardwise.parallel import Runtime
from shardwise.state.packed import in_weights_place, packed_of
from shardwise.state.to_rank0 import full_tensors
from shardwise.world.collectively import collectively

Facts = Mapping[str, tuple[tuple[int, ...], str]]  # name of a buffer -> shape and dtype
_TOGETHER = 64 << 20  # bytes of tensors that are in memory in full at a time, where they do not depend on one another


@dataclass(frozen=True)
class Stored:
    """An entry of a model's state dict that is a tensor.

    Attributes:
        key: the model's tensor that it is, by canonical name; or a name for what is computed.
        made_of: canonical names of the tensors that it is computed from; None: it is one of the model's.
        is_weight: it is a parameter, or computed from one.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    is_weight: bool
    made_of: frozenset[str] | None = None


def stored_tensors(runtime: Runtime, buffers: Facts | None = None, *, unpacked: bool = False) -> dict[str, Stored]:
    """Name -> entry, of all that is stored of a model: a tied tensor once, under its first name. ``buffers``: from
    ``Runtime.saved_buffers``; None: this rank's. ``unpacked``: the plain values of packed weights in place of their parts."""
    recipe = runtime.recipe
    buffers = runtime.saved_buffers() if buffers is None else buffers
    if runtime.own_state is None:
        found = {name: Stored(name, p.shape, p.storage, True) for name, p in recipe.params.items()}
        found |= {name: Stored(name, shape, dtype, False) for name, (shape, dtype) in buffers.items()}
        if unpacked:
            plain = {
                name: Stored(name, weight.shape, weight.dtype, True) for name, weight in packed_of(runtime).items()
            }
            found = {name: (found | plain)[name] for name in in_weights_place(runtime, found)}
        return found
    if unpacked:
        refuse_own_methods(runtime, "save_weights of")
    entries = own_of(runtime, buffers).encode(runtime.module).entries
    homes: dict[str, str] = {}  # canonical name -> the name that it is stored under
    for name, entry in entries.items():
        if entry.home is not None and (name == entry.home or entry.home not in homes):
            homes[entry.home] = name
    found = {}
    for name, entry in entries.items():
        is_weight = any(made in recipe.params for made in entry.made_of)
        if entry.home is None:
            found[name] = Stored(f"{name} (computed)", entry.shape, dtype_name(entry.dtype), is_weight, entry.made_of)
        elif homes[entry.home] == name:
            found[name] = Stored(entry.home, entry.shape, dtype_name(entry.dtype), is_weight)
    return found


def refuse_own_methods(runtime: Runtime, call: str, *, packed: bool = False) -> None:
    """Refuses the plain values of packed weights of a model whose modules' own methods decide what is stored."""
    if runtime.own_state is not None and packed_of(runtime) and not packed:
        name, methods = next(iter(runtime.own_state.methods.items()))
        raise UnsupportedError(
            f"{call} a model with packed weights and {', '.join(methods)}",
            why="the method is given what the module holds, and not the plain values of what is packed",
            fix="use sw.full_state_dict(model, packed=True), or sw.CheckpointManager: both keep the bytes",
            name=name or None,
        )


def not_stored(runtime: Runtime) -> list[str]:
    """Canonical names of parameters and persistent buffers that are not stored as they are, in the model's order: a run that
    goes on exactly needs their own values too."""
    if runtime.own_state is None or runtime.own_state.stores_itself:
        return []
    kept = {entry.key for entry in stored_tensors(runtime).values()}
    names = [*runtime.recipe.params, *(n for n, b in runtime.recipe.buffers.items() if b.persistent)]
    return [name for name in names if name not in kept]


def computed_values(runtime: Runtime, place: str) -> dict[str, Tensor]:
    """Key -> full tensor of each computed entry, on rank 0; ``{}`` elsewhere. All ranks must call it."""
    if runtime.own_state is None:
        return {}
    buffers = runtime.saved_buffers(of_main=True)
    stored = collectively(
        runtime.world,
        f"{place}, running the modules' own methods",
        lambda: stored_tensors(runtime, buffers),
        same=lambda told: repr([(n, e.key, e.shape, e.dtype, sorted(e.made_of or ())) for n, e in told.items()]),
        differ=CheckpointError(
            f"{place} of a model whose modules store other tensors on other ranks",
            why="what they store depends on something that is not equal on all ranks",
            fix="let the modules' own methods depend on what all ranks have",
        ),
    )
    made_of = {name: entry.made_of for name, entry in stored.items() if entry.made_of is not None}
    found: dict[str, Tensor] = {}
    for names, needed in groups_of(made_of, lambda name: _num_bytes(runtime, name)):
        values = full_tensors(runtime, sorted(needed))
        state = collectively(
            runtime.world,
            f"{place}, running the modules' own methods with values",
            functools.partial(_encoded, runtime, values, names, stored),
            on_main=True,
        )
        found |= {stored[name].key: state[name].detach() for name in names} if state is not None else {}
    return found


def _encoded(
    runtime: Runtime, values: Mapping[str, Tensor], names: Iterable[str], stored: Mapping[str, Stored]
) -> Mapping[str, Any]:
    state = own_of(runtime).encode(runtime.module, values).state
    for name in names:
        made = state.get(name)
        there = (tuple(made.shape), dtype_name(made.dtype)) if isinstance(made, Tensor) and not made.is_meta else None
        if there != (stored[name].shape, stored[name].dtype):
            raise UnsupportedError(
                "what a module stores by its own method, of another shape or dtype than on tensors without values",
                why="all ranks plan the files before there are values",
                fix="let shape and dtype follow from shapes and dtypes",
                name=name,
            )
    return state


def own_of(runtime: Runtime, buffers: Facts | None = None) -> OwnState:
    """What runs the modules' own methods, on tensors with the shapes of now. ``buffers``: as for :func:`stored_tensors`."""
    assert runtime.own_state is not None
    facts = runtime.saved_buffers() if buffers is None else buffers
    runtime.own_state.follow({name: (shape, dtype_of(dtype)) for name, (shape, dtype) in facts.items()})
    return runtime.own_state


def _num_bytes(runtime: Runtime, name: str) -> int:
    params, buffers = runtime.recipe.params, runtime.recipe.buffers
    dtype = params[name].storage if name in params else buffers[name].dtype
    shape = params[name].shape if name in params else buffers[name].shape
    return torch.Size(shape).numel() * dtype_of(dtype).itemsize


def groups_of(made_of: Mapping[str, frozenset[str]], num_bytes: Any) -> Iterator[tuple[list[str], frozenset[str]]]:
    """Divides results into groups that share no tensor they are made of, small ones together: ``(results, tensors)``."""
    alone: list[tuple[list[str], frozenset[str]]] = []
    for name, needed in made_of.items():
        joined = [group for group in alone if group[1] & needed]
        alone = [group for group in alone if not group[1] & needed]
        alone.append(
            ([n for names, _ in joined for n in names] + [name], needed.union(*(others for _, others in joined)))
        )
    names: list[str] = []
    needed = frozenset[str]()
    for more, others in alone:
        if names and sum(map(num_bytes, needed | others)) > _TOGETHER:
            yield names, needed
            names, needed = [], frozenset()
        names, needed = [*names, *more], needed | others
    if names:
        yield names, needed
