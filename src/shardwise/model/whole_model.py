"""Whether what was found in some blocks of each kind is right in a whole model, without keeping what its layers get.

The model runs whole, and as each rank would run it. Of the input of each layer, of the output, and of what the model keeps, a
few sums are compared: a model of 80 blocks would not fit into memory.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.model.certificate import part_of_run
from shardwise.model.found import Found, Region, part_of
from shardwise.model.regions import weights_for
from shardwise.model.run import Call, Place, Run
from shardwise.model.trial import Trial, Uses

__all__ = ["holds_for_all"]

_ALLOWED = 1e-10
"""The largest error of a sum, relative to the norm of what was summed."""


def holds_for_all(trial: Trial, degree: int, found: Found, uses: Uses) -> bool:
    """Whether what was found in some blocks is right in the whole model, whose code may treat its blocks in other ways: in
    training, of all ranks; and in eval mode, of the first one, where the mode makes a difference.

    Args:
        trial: of the whole model.
        degree: how many ranks share a layer.
        found: in some blocks of each kind, and the same in the others.
        uses: gets what the whole model calls.
    """
    try:
        in_eval = _watched(trial, found.regions, degree, uses, is_training=False)
        training = _watched(trial, found.regions, degree, uses, is_training=True)
        is_used_elsewhere = _used_elsewhere(trial, found.regions)
    except Exception:  # it does what the blocks that were searched do not show
        return False
    if is_used_elsewhere or _differs(trial, found.regions, degree, range(degree), training):
        return False
    if training.is_like(in_eval):
        return True
    trial.set_training(False)
    return not (_used_elsewhere(trial, found.regions) or _differs(trial, found.regions, degree, range(1), in_eval))


_Source = str | tuple[str, Place]
"""The weight of a layer, a tensor, or an argument of a module."""


class _Sums(NamedTuple):
    """Of a tensor: its shape, and two sums of its numbers: one with a weight for each place, and their norm."""

    shape: tuple[int, ...]
    values: Tensor

    def is_close(self, other: "_Sums", allowed: float) -> bool:
        return self.shape == other.shape and bool(
            ((self.values - other.values).abs() <= allowed * self.values[1].clamp(min=1e-300)).all()  # False for NaN
        )


class _Watched(NamedTuple):
    """What is compared of a run of the whole model.

    Attributes:
        functions: that were called.
        inputs: call -> sums of its input.
        parts: call of a row-parallel layer -> sums of each rank's part of its input.
        ends: of the output, and of what the model keeps.
    """

    functions: list[str]
    inputs: dict[Call, _Sums]
    parts: dict[Call, list[_Sums]]
    ends: list[_Sums]

    def is_like(self, other: "_Watched") -> bool:
        """Whether the same functions were called in both, on the same numbers."""
        return (
            self.functions == other.functions
            and self.inputs.keys() == other.inputs.keys()
            and all(sums.is_close(other.inputs[call], 0.0) for call, sums in self.inputs.items())
            and _are_close(self.ends, other.ends, 0.0)
        )


def _watched(trial: Trial, regions: Sequence[Region], degree: int, uses: Uses, *, is_training: bool) -> _Watched:
    rows = {weight for region in regions for weight in region.rows}
    inputs: dict[Call, _Sums] = {}
    parts: dict[Call, list[_Sums]] = {}

    def watch(call: Call, x: Tensor) -> None:
        if not x.is_meta:
            inputs[call] = _sums(x)
            if call.weight in rows:
                parts[call] = [_sums(part_of(x, degree, rank)) for rank in range(degree)]

    trial.set_training(is_training)
    with trial.noting(uses) as note:
        run = trial.run(watch=watch, note=note)
    return _Watched(run.functions, inputs, parts, _ends(run))


def _used_elsewhere(trial: Trial, regions: Sequence[Region]) -> bool:
    """Whether something that regions start from is used outside of them too, where its gradient is not a part of a sum: outputs
    that every rank has whole, tensors between the layers, arguments."""
    inside: dict[_Source, set[str]] = {}  # the layers that may get it
    for region in regions:
        for source in (*region.whole, *region.tensors, *((region.module, place) for place in region.arguments)):
            inside.setdefault(source, set()).update(region.rows, region.inner)
    if not inside:
        return False
    tensors = trial.others()
    leaves: list[tuple[_Source, Tensor]] = [(name, tensor) for name, tensor in tensors.items() if name in inside]
    is_used = False

    def leaf(source: _Source, value: Tensor) -> Tensor:
        if source not in inside:
            return value
        leaves.append((source, value.detach().clone().requires_grad_()))
        return leaves[-1][1].clone()

    def look(x: Tensor, weight: str | None) -> None:
        nonlocal is_used
        sources = [tensor for source, tensor in leaves if weight not in inside[source]]
        if not is_used and sources and x.requires_grad:
            x = torch.view_as_real(x) if x.is_complex() else x
            grads = torch.autograd.grad((x * weights_for(x)).sum(), sources, retain_graph=True, allow_unused=True)
            is_used = any(grad is not None and bool((grad != 0).any()) for grad in grads)

    for name, tensor in tensors.items():
        tensor.requires_grad_(name in inside)
    try:
        run = trial.run(
            watch=lambda call, x: look(x, call.weight),
            outputs=lambda call, value: leaf(call.weight, value),
            changes={
                region.module: functools.partial(_leaf_of, leaf, region.module)
                for region in regions
                if region.arguments
            },
        )
    finally:
        for tensor in tensors.values():
            tensor.requires_grad_()
    for x in (*run.output, *(x for _, x in run.kept)):
        look(x, None)
    return is_used


def _leaf_of(leaf: Callable[[Any, Tensor], Tensor], module: str, place: Place, value: Tensor) -> Tensor:
    return leaf((module, place), value)


def _differs(trial: Trial, regions: Sequence[Region], degree: int, ranks: Iterable[int], whole: _Watched) -> str:
    """What some ranks get that they should not; "" if there is nothing."""
    narrowed = {weight for region in regions for weight in region.gets_whole}
    for rank in ranks:
        seen: dict[Call, _Sums] = {}
        try:
            run, _ = part_of_run(rank, trial, regions, degree, None, watch=functools.partial(_note, seen))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not _are_close(whole.ends, _ends(run), _ALLOWED):
            return "the output of the model, or what it keeps, is another"
        if whole.inputs.keys() != seen.keys():
            return "other layers are called"
        wanted = {
            call: whole.parts[call][rank] if call in whole.parts else sums
            for call, sums in whole.inputs.items()
            if call.weight not in narrowed
        }
        if other := next((call for call, want in wanted.items() if want.shape != seen[call].shape), None):
            return f"the input of {other.weight} has another shape"
        if wanted and (other := _first_other(wanted, seen)):
            return f"the input of {other.weight} is another"
    return ""


def _first_other(wanted: Mapping[Call, _Sums], seen: Mapping[Call, _Sums]) -> Call | None:
    """The first call of which the sums differ; all of them are compared at once, as one by one takes as long as a run."""
    want = torch.stack([sums.values for sums in wanted.values()])
    mine = torch.stack([seen[call].values for call in wanted])
    is_same = ((mine - want).abs() <= _ALLOWED * want[:, 1:].clamp(min=1e-300)).all(1)  # False for NaN
    return None if bool(is_same.all()) else list(wanted)[int(is_same.int().argmin())]


def _note(seen: dict[Call, _Sums], call: Call, x: Tensor) -> None:
    if not x.is_meta:
        seen[call] = _sums(x)


def _ends(run: Run) -> list[_Sums]:
    return [_sums(x) for x in (*run.output, *(x for _, x in run.kept)) if not x.is_meta]


def _are_close(some: Sequence[_Sums], others: Sequence[_Sums], allowed: float) -> bool:
    return len(some) == len(others) and all(x.is_close(y, allowed) for x, y in zip(some, others, strict=True))


def _sums(x: Tensor) -> _Sums:
    x = x.detach()
    flat = (torch.view_as_real(x) if x.is_complex() else x.double()).flatten()
    return _Sums(tuple(x.shape), torch.stack([flat.dot(_places(len(flat))), flat.norm()]))


@functools.lru_cache(maxsize=8)
def _places(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64).mul_(0.7548776662).frac_()
