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
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.model.layers import Call, Change, Place, Run, Trial
from shardwise.model.regions import (
    Cut,
    Found,
    Region,
    Setting,
    Whole,
    find_regions,
    part_of,
    rows_of,
    signature,
    weights_for,
)

__all__ = ["GATE", "certify", "find_certified", "settled"]

GATE = 1e-12
"""The largest error allowed, relative to the largest element of the tensor compared."""

_MOST_SETTINGS = 4  # kinds of settings that one region changes
_MOST_TRIES = 300
_MOST_TOGETHER = 20  # regions among which every choice is compared
_CONFIGURED = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
"""Numbers that a forward may read from ``self.config``."""

Settings = dict[Setting, int]


def find_certified(trial: Trial, degree: int) -> Found:
    """The regions for ``degree`` ranks that can be cut together, with their settings; and for every other linear layer
    that was called the reason why it stays as it is."""
    found, training = find_regions(trial, degree), trial.in_training()
    candidates, left = list(found.regions), dict(found.left)
    shown = dict[str, Region]()  # by the row-parallel layers, which no two candidates have in common
    known = dict[str, Settings]()
    while waiting := [region for region in _largest(trial, candidates) if region.rows[0] not in shown]:
        for region in waiting:
            kind = signature("; ".join(_layers(region)))
            first = {(region.module + place, attr): value for (place, attr), value in known.get(kind, {}).items()}
            result = settled(trial, region, degree, first)
            if isinstance(result, Region) and (why := certify(training, [result], degree)):
                result = f"in training mode: {why}"
            if isinstance(result, str):
                candidates.remove(region)
                left.update((weight, result) for weight in _layers(region))
                continue
            shown[region.rows[0]] = result
            settings = result.settings.items()
            known[kind] = {(name.removeprefix(region.module), attr): value for (name, attr), value in settings}
    kept = [shown[region.rows[0]] for region in _largest(trial, candidates)]
    if certify(trial, kept, degree, jointly=True):
        kept = _together(trial, kept, degree, left)
    cut = {weight for region in kept for weight in _layers(region)}
    beside = "the layers that it could be cut with are cut with others"
    left = {
        weight: left.get(weight, beside)
        for weight, layer in trial.layers.items()
        if weight not in cut and not layer.is_embedding
    }
    order = {weight: number for number, weight in enumerate(trial.layers)}
    kept.sort(key=lambda region: order[region.rows[0]])
    return Found(kept, left)


def _largest(trial: Trial, regions: Sequence[Region]) -> list[Region]:
    """Of the regions those that can be cut beside each other, as many parameters of them as can be."""
    chosen: list[Region] = []
    rest = list(regions)
    while rest:
        group, reached = [], [rest[0]]
        while reached:
            region = reached.pop()
            rest.remove(region)
            group.append(region)
            reached += [other for other in rest if _clash(region, other) and other not in reached]
        chosen += _best(group, {id(region): _numel(trial, region) for region in group})
    return chosen


def _best(group: list[Region], numel: Mapping[int, int]) -> list[Region]:
    """The best choice of a group, of which each clashes with another; of a large one a good choice."""
    if not group:
        return []
    first = max(group, key=lambda region: (sum(_clash(region, other) for other in group), numel[id(region)]))
    others = [region for region in group if region is not first]
    taken = [first, *_best([region for region in others if not _clash(first, region)], numel)]
    if len(taken) == len(group) or len(group) > _MOST_TOGETHER:
        return taken
    skipped = _best(others, numel)
    return max(taken, skipped, key=lambda chosen: sum(numel[id(region)] for region in chosen))


def _numel(trial: Trial, region: Region) -> int:
    return sum(trial.module.get_parameter(weight).numel() for weight in {*region.columns, *region.rows})


def _clash(region: Region, other: Region) -> bool:
    """Whether two regions would cut the inputs and the outputs of one layer."""
    return bool(_sources(region) & {*other.rows} or {*region.rows} & _sources(other))


def _layers(region: Region) -> list[str]:
    return list(dict.fromkeys((*region.columns, *region.whole, *region.rows)))


def _sources(region: Region) -> set[str]:
    return {*region.columns, *region.whole}


def _together(trial: Trial, regions: Sequence[Region], degree: int, left: dict[str, str]) -> list[Region]:
    """Those of the regions that are right when all of them are cut, each tried beside those before it."""
    kept: list[Region] = []
    for region in regions:
        if why := certify(trial, [*kept, region], degree, jointly=True):
            left.update((weight, f"beside the other layers: {why}") for weight in _layers(region))
        else:
            kept.append(region)
    return kept


# ---- settings --------------------------------------------------------------------------------------------------------


def settled(trial: Trial, region: Region, degree: int, first: Settings | None = None) -> Region | str:
    """The region with the fewest settings under which it is right; or why it is not right without any.

    Args:
        trial: the model.
        region: without settings.
        degree: how many ranks share it.
        first: settings to try before all others.
    """
    why, whole = "", _whole(trial, [region], alone=region)
    narrowed = _may_be_narrowed(region, whole, degree)
    tries = itertools.chain([first] if first else [], [Settings()], _candidates(trial, region, degree))
    for settings in itertools.islice(tries, _MOST_TRIES):
        for places in ((), narrowed) if narrowed else ((),):
            tried = replace(region, settings=settings, narrowed=places)
            found = _certify(trial, [tried], degree, whole, alone=tried)
            if not found:
                return tried
            if not settings and not places:
                why = found
    return why


def _may_be_narrowed(region: Region, whole: Run, degree: int) -> tuple[Place, ...]:
    """The arguments that column-parallel layers read, and nothing else that has a gradient."""
    read = [x for call, x in whole.inputs.items() if call.weight in _sources(region)]
    return tuple(
        place
        for place, leaves in whole.arguments.items()
        if place not in region.arguments
        and all(leaf.dim() and leaf.shape[-1] % degree == 0 for leaf in leaves)
        and all(any(x.shape == leaf.shape and torch.equal(x, leaf) for x in read) for leaf in leaves)
    )


def _candidates(trial: Trial, region: Region, degree: int) -> Iterator[Settings]:
    """Settings to try: the same for modules that differ in the number of their block only; numbers of heads first."""
    kinds: dict[tuple[str, str, int], list[Setting]] = {}
    for (name, attr), old in _numbers_read(trial, region).items():
        kinds.setdefault((signature(f"{name}."), attr, old), []).append((name, attr))
    options = {kind: values for kind in kinds if (values := _values(kind[2], degree))}
    heads = [
        kind for kind in options if "head" in kind[1] and not any(word in kind[1] for word in ("dim", "size", "group"))
    ]
    for divisor in (d for d in range(degree, 1, -1) if degree % d == 0):
        if chosen := [kind for kind in heads if kind[2] % divisor == 0]:
            yield {place: kind[2] // divisor for kind in chosen for place in kinds[kind]}
    for number in range(1, _MOST_SETTINGS + 1):
        for chosen in itertools.combinations(options, number):
            for values in itertools.product(*(options[kind] for kind in chosen)):
                yield {place: value for kind, value in zip(chosen, values, strict=True) for place in kinds[kind]}


def _values(old: int, degree: int) -> list[int]:
    """What a whole number may be on one of ``degree`` ranks: a part of it; 1, of fewer heads than there are ranks."""
    values = [old // d for d in range(degree, 1, -1) if degree % d == 0 and old % d == 0]
    return [*values, 1] if 1 < old < degree and 1 not in values else values


def _numbers_read(trial: Trial, region: Region) -> dict[Setting, int]:
    """The whole numbers that modules of a region read from their attributes when they run."""
    read: dict[Setting, int] = {}
    with contextlib.ExitStack() as stack:
        for name, module in trial.module.named_modules():
            if not region.module or f"{name}.".startswith(f"{region.module}."):
                stack.enter_context(_noting_reads(name, module, read))
        trial.run(until=_calls(trial, [region]))
    return read


@contextlib.contextmanager
def _noting_reads(name: str, module: nn.Module, read: dict[Setting, int]) -> Iterator[None]:
    """Context manager: notes which whole numbers among the attributes of ``module`` are read, by a class on top of its
    own."""
    kind = type(module)
    numbers = {key: value for key, value in vars(module).items() if type(value) is int and value > 1}
    config = vars(module).get("config")
    configured = {key: value for key in _CONFIGURED if type(value := getattr(config, key, None)) is int}

    def getattribute(self: nn.Module, key: str) -> object:
        if key in numbers:
            read[name, key] = numbers[key]
        elif key == "config":
            read.update(((name, f"config.{inner}"), value) for inner, value in configured.items())
        return kind.__getattribute__(self, key)

    module.__class__ = type(kind.__name__, (kind,), {"__getattribute__": getattribute, "__module__": kind.__module__})
    try:
        yield
    finally:
        module.__class__ = kind


@contextlib.contextmanager
def _set(root: nn.Module, settings: Settings) -> Iterator[None]:
    """Context manager: modules have these values. A configuration is copied first, as modules share it."""
    with contextlib.ExitStack() as stack:
        copied: set[str] = set()
        for (name, attr), value in settings.items():
            module = root.get_submodule(name)
            outer, dot, inner = attr.partition(".")
            if outer not in copied or not dot:
                stack.callback(setattr, module, outer, getattr(module, outer))
            if dot and name not in copied:
                setattr(module, outer, copy.copy(getattr(module, outer)))
                copied.add(name)
            setattr(getattr(module, outer) if dot else module, inner or outer, value)
        yield


# ---- the certificate -------------------------------------------------------------------------------------------------


def certify(trial: Trial, regions: Sequence[Region], degree: int, *, jointly: bool = False) -> str:
    """Runs regions as each of ``degree`` ranks would. Returns what is not as in the whole model; "" if everything is.

    Of one region that is not to be tried ``jointly`` the gradients are compared too: those of the layers, tensors and
    arguments that it starts from.
    """
    alone = regions[0] if len(regions) == 1 and not jointly else None
    return _certify(trial, regions, degree, _whole(trial, regions, alone), alone)


def _whole(trial: Trial, regions: Sequence[Region], alone: Region | None) -> Run:
    return trial.run(detached=alone.module, until=_calls(trial, regions)) if alone else trial.run()


def _certify(trial: Trial, regions: Sequence[Region], degree: int, whole: Run, alone: Region | None) -> str:
    for rank in range(degree):
        try:
            why = _wrong_on(rank, trial, regions, degree, whole, alone)
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if why:
            return f"rank {rank} of {degree}: {why}"
    return ""


def _wrong_on(rank: int, trial: Trial, regions: Sequence[Region], degree: int, whole: Run, alone: Region | None) -> str:
    local: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(_set(trial.module, region.settings))
            local |= stack.enter_context(_cut_tensors(trial.module, region, degree, rank))
        part = trial.run(
            rows={name: rows_of(cut, degree, rank) for region in regions for name, cut in region.columns.items()},
            changes={name: _slicing(regions, name, degree, rank) for name in {region.module for region in regions}},
            detached=alone.module if alone else None,
            until=_calls(trial, regions) if alone else frozenset(),
        )
    why = _outputs_differ(regions, whole, part, degree, rank)
    if alone and not why:
        why = _gradients_differ(trial, alone, whole, part, local, degree, rank) or _inner_differ(trial, alone, whole)
    return why


def _calls(trial: Trial, regions: Sequence[Region]) -> frozenset[Call]:
    """The calls of row-parallel layers."""
    rows = {weight for region in regions for weight in region.rows}
    return frozenset(call for call in trial.calls if call.weight in rows)


def _slicing(regions: Sequence[Region], module: str, degree: int, rank: int) -> Change:
    """Cuts the arguments of a module for a rank. One that an earlier region has cut already comes in as a part."""
    cuts = {place: cut for region in regions if region.module == module for place, cut in region.arguments.items()}

    narrowed = {place for region in regions if region.module == module for place in region.narrowed}

    def change(place: Place, value: Tensor) -> Tensor:
        if place in narrowed:
            return value.narrow(-1, 0, value.shape[-1] // degree)
        if not isinstance(cut := cuts.get(place), tuple):
            return value
        dim, rows = cut
        is_full = value.shape[dim] == sum(part.size for part in rows)
        return value.index_select(dim, rows_of(rows, degree, rank)) if is_full else value

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
                local[name] = nn.Parameter(mine) if attr in owner._parameters else mine.requires_grad_()
                stack.callback(setattr, owner, attr, before)
                setattr(owner, attr, local[name])
        yield local


def _outputs_differ(regions: Sequence[Region], whole: Run, part: Run, degree: int, rank: int) -> str:
    rows = {weight for region in regions for weight in region.rows}
    narrowed = {weight for region in regions if region.narrowed for weight in _sources(region)}
    if whole.inputs.keys() != part.inputs.keys():
        return "other layers are called"
    for call, x in whole.inputs.items():
        want = part_of(x, degree, rank) if call.weight in rows else x
        if call.weight in narrowed and part.inputs[call].shape != x.shape:
            want = x.narrow(-1, 0, x.shape[-1] // degree)  # it gets the whole one
        if why := _differs(part.inputs[call], want):
            return f"the input of {call.weight} {why}"
    for place, want in whole.kept.items():
        if why := _differs(part.kept[place], want):
            return f"{place[0]}.{place[1]}, which is kept after the forward, {why}"
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
        mine, cut, name = given[start], _cut_of(region, start), _shown(region, start)
        if cut is None:
            if bool((want != 0).any()):
                return f"{name} has a part of the gradient, and is not said to be in the region"
            continue
        if isinstance(cut, tuple) and mine.shape != want.shape:  # of an argument the whole one is kept
            want = want.index_select(cut[0], rows_of(cut[1], degree, rank))
        if why := _differs(mine, want):
            return f"the gradient of {name} {why}"
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


def _cut_of(region: Region, start: Start) -> Cut | None:
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
    """Whether the inputs of the column-parallel layers have whole gradients on every rank, or parts of a sum."""
    for call, x in whole.inputs.items():
        if call.weight not in region.columns or not x.requires_grad:
            continue
        starts = _starts(whole, trial.others())
        grads = _gradients({call: x}, {call: weights_for(x)}, starts)
        used = [start for start, grad in grads.items() if bool((grad != 0).any())]
        within = [start for start in used if isinstance(start, Call) and start.weight in region.whole]
        if bool(within) != (call.weight in region.inner):
            return f"the input of {call.weight} has {'a part of' if within else 'all of'} its gradient on each rank"
        for start in used if within else ():
            if start not in within and not isinstance(_cut_of(region, start), Whole):
                return f"{_shown(region, start)} has a part of the gradient, and is not said to be in the region"
    return ""


def _differs(mine: Tensor, want: Tensor) -> str:
    """How a tensor differs from the part of the whole one that it should be; "" if it does not."""
    if mine.shape != want.shape:
        return f"has the shape {tuple(mine.shape)}, not {tuple(want.shape)}"
    if mine.is_meta:  # numbers of positions, made on the device of a weight
        return ""
    if not mine.is_floating_point() and not mine.is_complex():
        return "" if torch.equal(mine, want) else "has other values"
    if not mine.numel():
        return ""
    error = float((mine - want).detach().abs().max()) / max(float(want.detach().abs().max()), 1e-300)
    return "" if error <= GATE else f"is off by {error:.1e}"
