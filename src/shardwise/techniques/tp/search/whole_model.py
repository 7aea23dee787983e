"""Whether what was found in some blocks of each kind is right in a whole model, without keeping what its layers get.

The model runs whole, and as each rank would run it. Of the input of each layer, of the output, of what the model keeps, and of the
gradients within regions a few sums are compared: a model of 80 blocks would not fit into memory.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise._torch.autograd import graph_below
from shardwise.model.run import Call, Place, Run
from shardwise.model.trial import Trial, Uses
from shardwise.techniques.tp.search.certificate import cut_of, part_of_run
from shardwise.techniques.tp.search.region_records import Found, Region, part_of, rows_of
from shardwise.techniques.tp.search.regions import forget_weights, weights_for

_ALLOWED = 1e-10
"""The largest error of a sum, relative to the norm of what was summed."""


def holds_for_all(trial: Trial, degree: int, found: Found, uses: Uses) -> bool:
    """Whether what was found in some blocks is right in the whole model, whose code may treat its blocks in other ways: in
    training and in eval mode, where the mode makes a difference.

    Args:
        trial: of the whole model.
        degree: how many ranks share a layer.
        found: in some blocks of each kind, and the same in the others.
        uses: gets what the whole model calls.
    """
    regions = found.regions
    try:
        in_eval = _watched(trial, regions, degree, uses, is_training=False, looks=False)
        training = _watched(trial, regions, degree, uses, is_training=True)
        cut = {weight for region in regions for weight in (*region.layers, *region.readers)}
        if any({*uses.get(weight, ())} != {*found.callers.get(weight, ())} for weight in cut):
            return False  # a hook calls a layer, in some blocks
        if trial.measured & {name for each in regions for w in each.layers for name in trial.layers[w].names}:
            return False  # some blocks read the shape of what is cut
        if not _is_right(trial, regions, degree, training):
            return False
        if training.is_like(in_eval):
            return True
        return _is_right(trial, regions, degree, _watched(trial, regions, degree, uses, is_training=False))
    except Exception:  # it does what the blocks that were searched do not show
        return False


def _is_right(trial: Trial, regions: Sequence[Region], degree: int, whole: "_Watched") -> bool:
    """Whether regions are right in the mode in which the model is, and in the forward after one that keeps something."""
    if whole.gradients.strays or _used_elsewhere(trial, regions) or _differs(trial, regions, degree, whole):
        return False
    if whole.keeps:
        again = _watched(trial, regions, degree, {}, is_training=trial.module.training, again=True)
        return not (again.gradients.strays or _differs(trial, regions, degree, again))
    return True


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
        gradients: of what row-parallel layers get.
        keeps: whether anything is kept.
        again: whether it was the second forward.
    """

    functions: list[str]
    inputs: dict[Call, _Sums]
    parts: dict[Call, list[_Sums]]
    ends: list[_Sums]
    gradients: "_Gradients"
    keeps: bool
    again: bool

    def is_like(self, other: "_Watched") -> bool:
        """Whether the same functions were called in both, on the same numbers."""
        return (
            self.functions == other.functions
            and self.inputs.keys() == other.inputs.keys()
            and all(sums.is_close(other.inputs[call], 0.0) for call, sums in self.inputs.items())
            and _are_close(self.ends, other.ends, 0.0)
        )


def _watched(
    trial: Trial,
    regions: Sequence[Region],
    degree: int,
    uses: Uses,
    *,
    is_training: bool,
    looks: bool = True,
    again: bool = False,
) -> _Watched:
    """A run. ``looks``: at the parts of ranks and at gradients too; ``again``: it is the second forward."""
    inputs: dict[Call, _Sums] = {}
    parts: dict[Call, list[_Sums]] = {}
    gradients = _Gradients(trial, regions, degree)

    def watch(call: Call, x: Tensor) -> None:
        if not x.is_meta:
            inputs[call] = _sums(x)
            if looks and call.weight in gradients.regions:
                parts[call] = [_sums(part_of(x, degree, rank)) for rank in range(degree)]
                gradients.look(call, x)

    trial.set_training(is_training)
    with trial.noting(uses) as note:
        run = trial.run(watch=watch, note=note, again=again, **gradients.options())
    return _Watched(run.functions, inputs, parts, _ends(run), gradients, run.keeps, again)


class _Gradients:
    """Sums of the gradients of what row-parallel layers get, while a run goes on: blocks with one forward may have several
    backwards, as where some of them use a parameter between the layers. Of each region one rank's part is looked at, in turn.

    Args:
        trial: of the whole model.
        regions: that are cut.
        degree: how many ranks share a layer.
        rank: which of them runs; None: the whole model does.

    Attributes:
        regions: weight of a row-parallel layer -> its region, and the rank.
        sums: call, and what the gradient is of, where it is not zero -> its sums; of what is cut those of the rank's part.
        strays: whether a gradient comes to what is not said to be in the region, or to another rank's part.
    """

    def __init__(self, trial: Trial, regions: Sequence[Region], degree: int, rank: int | None = None):
        self._trial, self._degree, self._rank = trial, degree, rank
        turns = [(region, (i + i // degree) % degree) for i, region in enumerate(regions)]
        self._looked_at = [(region, turn) for region, turn in turns if rank in (None, turn)]
        self.regions = {weight: (region, turn) for region, turn in self._looked_at for weight in region.rows}
        self._sources = {weight for region, _ in self._looked_at for weight in region.sources}
        self.sums: dict[tuple[Call, Any], _Sums] = {}
        self.strays = False
        self._starts: dict[int, tuple[str | None, Any, Callable[[], Tensor | None]]] = {}  # none is kept alive for this
        self._has_tensors = False

    def options(self) -> dict[str, Any]:
        modules = {region.module for region, _ in self._looked_at}
        changes = {module: functools.partial(self._leaf, module) for module in modules}
        return {"outputs": self._output, "changes": changes}

    def _output(self, call: Call, value: Tensor) -> Tensor:
        is_start = self._rank is None or call.weight in self._sources
        return self._leaf(None, call, value) if is_start else value

    def _leaf(self, module: str | None, start: Any, value: Tensor) -> Tensor:
        """A leaf in the place of an output of a layer, or of an argument of a module."""
        leaf = value.detach().clone().requires_grad_()
        self._starts[id(leaf)] = module, start if module is None else (start, module), weakref.ref(leaf)
        return leaf.clone()

    def look(self, call: Call, x: Tensor) -> None:
        """Adds those of what a row-parallel layer gets."""
        if not x.requires_grad:
            return
        if not self._has_tensors:
            self._starts |= {id(x): (None, name, weakref.ref(x)) for name, x in self._trial.others().items()}
            self._has_tensors = True
        starts = [
            (*known[:2], leaf) for leaf in _leaves_of(x) if (known := self._starts.get(id(leaf))) and known[2]() is leaf
        ]
        if not starts:
            return
        region, rank = self.regions[call.weight]
        num_inputs = x.shape[-1] * (1 if self._rank is None else self._degree)
        weights = part_of(weights_for(x.new_empty(()).expand(*x.shape[:-1], num_inputs)), self._degree, rank)
        total = ((part_of(x, self._degree, rank) if self._rank is None else x) * weights).sum()
        grads = torch.autograd.grad(total, [tensor for *_, tensor in starts], retain_graph=True, allow_unused=True)
        for (module, start, _), grad in zip(starts, grads, strict=True):
            if grad is not None and bool(norm := grad.norm()):
                cut = cut_of(region, start) if module in (None, region.module) else None
                self.strays |= cut is None
                # Of an argument the whole one is kept.
                if isinstance(cut, tuple) and module is None and self._rank is None:
                    grad = grad.index_select(cut[0], rows_of(cut[1], self._degree, rank))
                    self.strays |= bool((grad.norm() - norm).abs() > _ALLOWED * norm)
                self.sums[call, start] = _sums(grad)


def _leaves_of(x: Tensor) -> list[Tensor]:
    """The leaves of autograd that a tensor is made of."""
    return [node.variable for node in graph_below([x.grad_fn]) if hasattr(node, "variable")]


def _are_those_of(whole: _Gradients, ranks: Sequence[_Gradients]) -> bool:
    """Whether the gradients of the ranks are those of the whole model."""
    found = {key: sums for each in ranks for key, sums in each.sums.items()}
    if whole.sums.keys() != found.keys() or any(each.strays for each in ranks):
        return False
    return all(sums.is_close(found[key], _ALLOWED) for key, sums in whole.sums.items())


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


def _differs(trial: Trial, regions: Sequence[Region], degree: int, whole: _Watched) -> str:
    """What some ranks get that they should not; "" if there is nothing."""
    narrowed = {weight for region in regions for weight in region.gets_whole}
    gradients: list[_Gradients] = []
    for rank in range(degree):
        seen: dict[Call, _Sums] = {}
        gradients.append(_Gradients(trial, regions, degree, rank))
        try:
            watch, options = functools.partial(_note, seen, gradients[-1]), gradients[-1].options()
            run, _ = part_of_run(rank, trial, regions, degree, None, watch=watch, again=whole.again, **options)
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
    return "" if _are_those_of(whole.gradients, gradients) else "a gradient within a region is another"


def _first_other(wanted: Mapping[Call, _Sums], seen: Mapping[Call, _Sums]) -> Call | None:
    """The first call of which the sums differ; all of them are compared at once, as one by one takes as long as a run."""
    want = torch.stack([sums.values for sums in wanted.values()])
    mine = torch.stack([seen[call].values for call in wanted])
    is_same = ((mine - want).abs() <= _ALLOWED * want[:, 1:].clamp(min=1e-300)).all(1)  # False for NaN
    return None if bool(is_same.all()) else list(wanted)[int(is_same.int().argmin())]


def _note(seen: dict[Call, _Sums], gradients: _Gradients, call: Call, x: Tensor) -> None:
    if not x.is_meta:
        seen[call] = _sums(x)
        if call.weight in gradients.regions:
            gradients.look(call, x)


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


def forget_drawn() -> None:
    """Lets go of the tensors that were drawn for a search, which are as large as the outputs of the model."""
    _places.cache_clear()
    forget_weights()
