"""Shows that regions can be cut, by running the model's own code on what each rank would have.

A column-parallel layer with a whole input computes exactly its rows of the whole output, and the outputs of a
row-parallel layer on all ranks sum up to the whole one. So only the code between them can be wrong for a part; it is
run for each rank in float64, on that rank's rows of random outputs. It must give the rank's part of every row-parallel
input, and to every tensor that it started from the gradient that this part has in the whole model.

Shown is what the code does at one random point, in eval mode and in training mode without dropout. Not covered are
branches on values that were not taken.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import first_line
from shardwise.model.run import Call, Place, Run
from shardwise.model.tensors import parameter_like
from shardwise.model.trial import Change, Trial
from shardwise.techniques.tp.search.region_records import Cut, Region, Setting, Whole, part_of, rows_of
from shardwise.techniques.tp.search.regions import weights_for

GATE = 1e-12
"""The largest error allowed, relative to the largest element of the tensor compared."""

Settings = dict[Setting, int]


def certify(trial: Trial, regions: Sequence[Region], degree: int, *, jointly: bool = False) -> str:
    """Runs regions as each of ``degree`` ranks would. Returns what is not as in the whole model; "" if everything is.

    Of one region that is not to be tried ``jointly`` the gradients are compared too: those of the layers, tensors and
    arguments that it starts from. Of a model that keeps something, the forward after it is compared too.
    """
    alone = regions[0] if len(regions) == 1 and not jointly else None
    whole = whole_run(trial, regions, alone)
    if alone and (why := whole_wrong(trial, alone, whole, degree)):
        return why
    why = parts_wrong(trial, regions, degree, whole, alone)
    if whole.keeps and not (why or alone):
        why = parts_wrong(trial, regions, degree, trial.run(again=True), None, again=True)
    return why


def whole_run(trial: Trial, regions: Sequence[Region], alone: Region | None) -> Run:
    """The run of the whole model that is compared with. ``alone``: the only region, whose gradients are compared."""
    if alone is None:
        return trial.plain()
    calls = calls_of(trial, regions)
    return trial.plain(detached=alone.module).until(calls) or trial.run(detached=alone.module, until=calls)


def whole_wrong(trial: Trial, region: Region, whole: Run, degree: int) -> str:
    """What in the run of the whole model shows that a region cannot be cut, whatever its settings are; "" if nothing does."""
    return (
        _used_elsewhere(trial, region)
        or _inner_differ(trial, region, whole)
        or _gradients_mixed(trial, region, whole, degree)
    )


def _used_elsewhere(trial: Trial, region: Region) -> str:
    """What a region starts from that other layers, the output of the model, or what it keeps, use too: its gradient from there is
    whole on every rank, and that from the region a part of a sum. "" if there is none."""
    run = trial.plain(detached=region.module)
    inside = {*region.rows, *region.inner}
    rest = [x for call, x in run.inputs.items() if call.weight not in inside]
    rest += [*run.output, *(x for _, x in run.kept)]
    rest = [torch.view_as_real(x) if x.is_complex() else x for x in rest if x.requires_grad]
    starts = {
        start: tensor
        for start, tensor in _starts(run, trial.others()).items()
        if cut_of(region, start) is not None and tensor.requires_grad
    }
    if not rest or not starts:
        return ""
    total = torch.stack([(x * weights_for(x)).sum() for x in rest]).sum()
    grads = torch.autograd.grad(total, list(starts.values()), retain_graph=True, allow_unused=True)
    for start, grad in zip(starts, grads, strict=True):
        if grad is not None and bool((grad != 0).any()):
            return (
                f"{_shown(region, start)} {'are' if isinstance(start, Call) else 'is'} also used outside of its layers"
            )
    return ""


def parts_wrong(
    trial: Trial, regions: Sequence[Region], degree: int, whole: Run, alone: Region | None, **options: Any
) -> str:
    """What is not as in the whole model when regions are run as each rank would; "" if everything is. ``options``: of
    :meth:`Trial.run`."""
    for rank in range(degree):
        try:
            why = _wrong_on(rank, trial, regions, degree, whole, alone, **options)
        except Exception as error:
            first = first_line(error)
            why = f"the code between its layers does not run on a part: {type(error).__name__}: {first}"
        if why:
            return f"rank {rank} of {degree}: {why}"
    return ""


def _wrong_on(
    rank: int,
    trial: Trial,
    regions: Sequence[Region],
    degree: int,
    whole: Run,
    alone: Region | None,
    **options: Any,
) -> str:
    part, local = part_of_run(rank, trial, regions, degree, alone, **options)
    why = _outputs_differ(regions, whole, part, degree, rank)
    return why or (_gradients_differ(trial, alone, whole, part, local, degree, rank) if alone else "")


def part_of_run(
    rank: int,
    trial: Trial,
    regions: Sequence[Region],
    degree: int,
    alone: Region | None,
    changes: Mapping[str, Change] | None = None,
    **options: Any,
) -> tuple[Run, dict[str, Tensor]]:
    """The run of a rank, and its part of the tensors of the regions. ``options``: of :meth:`Trial.run`; ``changes`` come before
    arguments are cut."""
    before = changes or {}
    local: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(_set(trial.module, region.settings))
            local |= stack.enter_context(_cut_tensors(trial.module, region, degree, rank))
        part = trial.run(
            rows={name: rows_of(cut, degree, rank) for region in regions for name, cut in region.columns.items()},
            changes={
                name: _slicing(regions, name, degree, rank, before.get(name, lambda _, value: value))
                for name in {region.module for region in regions}
            },
            detached=alone.module if alone else None,
            until=calls_of(trial, regions) if alone else frozenset(),
            **options,
        )
    return part, local


def dropouts(trial: Trial, regions: Sequence[Region], degree: int) -> dict[str, set[bool]]:
    """Weight of a layer of the regions -> whether what dropout is applied to after it is called, and before another
    layer of them is, is a rank's part; both, if some of it is.

    Args:
        trial: in training mode.
        regions: that are cut together.
        degree: how many ranks share them.
    """
    whole = trial.plain()
    if not whole.dropped:
        return {}
    part, _ = part_of_run(0, trial, regions, degree, None)
    of_regions = {weight for region in regions for weight in region.layers}
    order = list(whole.inputs)
    last: dict[Call | None, str] = {}  # the last call of a layer of the regions, up to each call
    for before, call in zip([None, *order], order, strict=False):
        last[call] = call.weight if call.weight in of_regions else last.get(before, "")
    found: dict[str, set[bool]] = {}
    for (call, x), (_, mine) in zip(whole.dropped, part.dropped, strict=True):
        found.setdefault(last.get(call, ""), set()).add(bool(_differs(mine, x)))
    return found


def calls_of(trial: Trial, regions: Sequence[Region]) -> frozenset[Call]:
    rows = {weight for region in regions for weight in region.rows}
    return frozenset(call for call in trial.calls if call.weight in rows)


def _slicing(regions: Sequence[Region], module: str, degree: int, rank: int, before: Change) -> Change:
    """Cuts the arguments of a module for a rank, of what ``before`` returns."""
    cuts = {place: cut for region in regions if region.module == module for place, cut in region.arguments.items()}
    narrowed = {place for region in regions if region.module == module for place in region.narrowed}

    def change(place: Place, value: Tensor) -> Tensor:
        value = before(place, value)
        if place in narrowed:
            return value.narrow(-1, 0, value.shape[-1] // degree)
        if not isinstance(cut := cuts.get(place), tuple):
            return value
        return value.index_select(cut[0], rows_of(cut[1], degree, rank))

    return change


@contextlib.contextmanager
def _cut_tensors(root: nn.Module, region: Region, degree: int, rank: int) -> Iterator[dict[str, Tensor]]:
    """Context manager: the tensors of a region are those of a rank. Yields them by name."""
    local: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for name, cut in region.tensors.items():
            path, _, attr = name.rpartition(".")
            owner = root.get_submodule(path)
            local[name] = before = getattr(owner, attr)
            if isinstance(cut, tuple):
                mine = before.detach().index_select(cut[0], rows_of(cut[1], degree, rank))
                local[name] = parameter_like(before, mine, True) if attr in owner._parameters else mine.requires_grad_()
                stack.callback(setattr, owner, attr, before)
                setattr(owner, attr, local[name])
        yield local


def _outputs_differ(regions: Sequence[Region], whole: Run, part: Run, degree: int, rank: int) -> str:
    rows = {weight for region in regions for weight in region.rows}
    narrowed = {weight for region in regions for weight in region.gets_whole}
    if whole.inputs.keys() != part.inputs.keys():
        return "other layers are called"
    for call, x in whole.inputs.items():
        want = part_of(x, degree, rank) if call.weight in rows else x
        if call.weight in narrowed and part.inputs[call].shape != x.shape:
            want = x.narrow(-1, 0, x.shape[-1] // degree)  # it gets the whole one
        if why := _differs(part.inputs[call], want):
            return f"the input of {call.weight} {why}"
    if len(whole.kept) != len(part.kept):
        return "other tensors are kept after the forward"
    for (name, want), (_, mine) in zip(whole.kept, part.kept, strict=True):
        if why := _differs(mine, want):
            return f"{name}, which is kept after the forward, {why}"
    for mine, want in zip(part.output, whole.output, strict=True):
        if why := _differs(mine, want):
            return f"the output of the model {why}"
    return ""


def _gradients_differ(
    trial: Trial, region: Region, whole: Run, part: Run, local: Mapping[str, Tensor], degree: int, rank: int
) -> str:
    """Compares the gradients of a random sum over the inputs of all row-parallel layers."""
    rows = {call: part_of(x, degree, rank) for call, x in whole.inputs.items() if call.weight in region.rows}
    weights = {call: part_of(weights_for(whole.inputs[call]), degree, rank) for call in rows}
    others = trial.others()
    wanted = _gradients(rows, weights, _starts(whole, others))
    given = _gradients({call: part.inputs[call] for call in rows}, weights, _starts(part, {**others, **local}))
    for start, want in wanted.items():
        mine, cut, name = given[start], cut_of(region, start), _shown(region, start)
        if cut is None:
            if bool((want != 0).any()):
                return f"{name} has a part of the gradient, and is not said to be in the region"
            continue
        if isinstance(cut, tuple) and mine.shape != want.shape:  # of an argument the whole one is kept
            want = want.index_select(cut[0], rows_of(cut[1], degree, rank))
        if why := _differs(mine, want):
            return f"the gradient of {name} {why}"
    return ""


def _gradients_mixed(trial: Trial, region: Region, whole: Run, degree: int) -> str:
    """Whether the backward mixes the parts, as hooks and functions with a backward of their own may: then the gradients of the
    parts do not sum up to that of all."""
    rows = {call: x for call, x in whole.inputs.items() if call.weight in region.rows}
    if not rows:
        return "none of the layers that it ends in was called"
    starts = _starts(whole, trial.others())
    wanted = _gradients(rows, {call: weights_for(x) for call, x in rows.items()}, starts)
    summed = {start: torch.zeros_like(grad) for start, grad in wanted.items()}
    for rank in range(degree):
        parts = {call: part_of(x, degree, rank) for call, x in rows.items()}
        weights = {call: part_of(weights_for(x), degree, rank) for call, x in rows.items()}
        for start, grad in _gradients(parts, weights, starts).items():
            summed[start] += grad
    for start, want in wanted.items():
        if why := _differs(summed[start], want):
            return f"the backward mixes what ranks have: the gradient of {_shown(region, start)} {why}"
    return ""


Start = Call | str | tuple[Place, int]
"""What a region starts from: a call of a layer, a tensor, an argument in one call of the region's module."""


def _starts(run: Run, tensors: Mapping[str, Tensor]) -> dict[Start, Tensor]:
    arguments = {(place, i): leaf for place, leaves in run.arguments.items() for i, leaf in enumerate(leaves)}
    return {**run.leaves, **tensors, **arguments}


def _gradients(
    inputs: Mapping[Call, Tensor], weights: Mapping[Call, Tensor], starts: Mapping[Start, Tensor]
) -> dict[Start, Tensor]:
    total = torch.stack([(x * weights[call]).sum() for call, x in inputs.items()]).sum()
    grads = torch.autograd.grad(total, list(starts.values()), retain_graph=True, allow_unused=True)
    return {
        start: torch.zeros_like(tensor) if grad is None else grad
        for (start, tensor), grad in zip(starts.items(), grads, strict=True)
    }


def cut_of(region: Region, start: Start) -> Cut | None:
    """How a region cuts what it starts from; None: the region does not start from it."""
    if isinstance(start, Call):
        whole = Whole() if start.weight in region.whole else None
        return (-1, region.columns[start.weight]) if start.weight in region.columns else whole
    return region.tensors.get(start) if isinstance(start, str) else region.arguments.get(start[0])


def _shown(region: Region, start: Start) -> str:
    if isinstance(start, Call):
        return f"the outputs of {start.weight}"
    return start if isinstance(start, str) else f"argument {start[0][0]!r} of {region.module or 'the model'}"


def _inner_differ(trial: Trial, region: Region, whole: Run) -> str:
    """Whether the inputs of the layers that it starts from have whole gradients on every rank, or parts of a sum."""
    for call, x in whole.inputs.items():
        if call.weight not in region.sources - {*region.rows} or not x.requires_grad:
            continue
        starts = _starts(whole, trial.others())
        grads = _gradients({call: x}, {call: weights_for(x)}, starts)
        used = [start for start, grad in grads.items() if bool((grad != 0).any())]
        partial = [start for start in used if _has_part(region, start)]
        if bool(partial) != (call.weight in region.inner):
            return f"the input of {call.weight} has {'a part of' if partial else 'all of'} its gradient on each rank"
        if partial and (rest := [start for start in used if start not in partial]):
            return f"{_shown(region, rest[0])} has a part of the gradient, and is not said to be in the region"
    return ""


def _has_part(region: Region, start: Start) -> bool:
    """Whether what a region starts from is whole on every rank, and its gradients there are parts of a sum."""
    if isinstance(start, Call):
        return start.weight in region.whole
    return isinstance(region.tensors.get(start), Whole) if isinstance(start, str) else start[0] in region.arguments


def _differs(mine: Tensor, want: Tensor) -> str:
    """How a tensor differs from the part of the whole one that it should be; "" if it does not."""
    if mine.shape != want.shape:
        return f"has the shape {tuple(mine.shape)}, not {tuple(want.shape)}"
    if mine.is_meta or want.is_meta:
        return "has no values"
    if not mine.is_floating_point() and not mine.is_complex():
        return "" if torch.equal(mine, want) else "has other values"
    if not mine.numel():
        return ""
    error = float((mine - want).detach().abs().max()) / max(float(want.detach().abs().max()), 1e-300)
    return "" if error <= GATE else f"is off by {error:.1e}"


@contextlib.contextmanager
def _set(root: nn.Module, settings: Settings) -> Iterator[None]:
    """Context manager: modules have these values. A configuration is copied first, as modules share it."""
    with contextlib.ExitStack() as stack:
        copied: set[str] = set()
        for (name, attr), value in settings.items():
            module = root.get_submodule(name)
            outer, dot, inner = attr.partition(".")
            if not dot or name not in copied:
                stack.callback(setattr, module, outer, getattr(module, outer))
            if dot and name not in copied:
                setattr(module, outer, copy.copy(getattr(module, outer)))
                copied.add(name)
            setattr(getattr(module, outer) if dot else module, inner or outer, value)
        yield
