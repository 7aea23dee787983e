"""Which linear layers of a model can be cut over several ranks together, found by gradients: the *regions*.

In tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053) some layers compute a part of their outputs on each
rank (*column-parallel*), the model's own code works on these parts, and a later layer takes a part of its inputs on
each rank and has its outputs summed (*row-parallel*). A region is such a group of layers with the code between them:
the attention of a block, its MLP.

A row-parallel layer's input is cut into equal parts, one for each rank. A column-parallel layer's outputs that a part
depends on are those which that rank must compute. Fused q|k|v in any order, grouped key/value heads, gate and up in one
layer, need no rule of their own. That a cut found so is right is shown by :mod:`shardwise.techniques.tp.search.certificate`, which
runs the model's code with it.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.model.blocks import has_no_forward
from shardwise.model.run import Call, Place, Run
from shardwise.model.trial import Trial
from shardwise.techniques.tp.search.layer_functions import parts_differ
from shardwise.techniques.tp.search.region_records import Cut, Found, Region, Rows, Whole, part_of, parts_of

_DRAWS = 16  # of the random outputs, at most: of one sample ReLU hides an output in every second draw


# ---- gradients -------------------------------------------------------------------------------------------------------


def weights_for(x: Tensor) -> Tensor:
    """Random numbers in the shape of ``x``: the same whenever they are asked for."""
    return _weights(tuple(x.shape), x.dtype)


@functools.lru_cache(maxsize=8)
def _weights(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


def forget_weights() -> None:
    """Lets go of what :func:`weights_for` has given."""
    _weights.cache_clear()


def gradients(x: Tensor, degree: int, rank: int, of: Iterable[Tensor]) -> list[Tensor | None]:
    """Gradients of a random sum over a rank's part of ``x``."""
    of = list(of)
    if not x.requires_grad or not of:
        return [None] * len(of)
    total = (part_of(x, degree, rank) * part_of(weights_for(x), degree, rank)).sum()
    return list(torch.autograd.grad(total, of, retain_graph=True, allow_unused=True))


def _mask(grad: Tensor, dim: int) -> Tensor:
    """Which indices along ``dim`` have a gradient anywhere."""
    return (grad != 0).movedim(dim, 0).flatten(1).any(1) if grad.dim() > 1 else grad != 0


def _is_zero(grad: Tensor | None) -> bool:
    return grad is None or not bool((grad != 0).any())


Masks = list[Tensor]
"""For each rank, which indices along a dim it needs."""


def _noted(masks: Masks | None, mask: Tensor, rank: int, degree: int) -> Masks:
    masks = masks or [torch.zeros_like(mask) for _ in range(degree)]
    masks[rank] |= mask
    return masks


def _has_holes(all_masks: Iterable[Masks]) -> bool:
    """Whether an index is needed by no rank: it may be hidden by chance."""
    return any(not bool(torch.stack(masks).any(0).all()) for masks in all_masks)


def _equal(masks: Masks) -> bool:
    return all(torch.equal(masks[0], mask) for mask in masks[1:])


@dataclass
class _Needs:
    """What the parts of one layer's input need."""

    outputs: dict[str, Masks] = field(default_factory=dict)  # by the weight of an earlier layer
    tensors: set[str] = field(default_factory=set)
    by_all: bool = False  # every part needs all that any part needs

    def partly(self) -> set[str]:
        """The layers of whose outputs some part needs only some."""
        if self.by_all:
            return set()
        return {name for name, masks in self.outputs.items() if not _equal(masks)}


class Reads:
    """What the inputs of all layers are made of when the arguments of ``module`` are cut off from what those were made of."""

    def __init__(self, trial: Trial, module: str):
        run, others = trial.plain(detached=module), trial.others()
        places = [(place, leaf) for place, leaves in run.arguments.items() for leaf in leaves]
        self._names = [*(call.weight for call in run.leaves), *others, *(place for place, _ in places)]
        self._sources = [*run.leaves.values(), *others.values(), *(leaf for _, leaf in places)]
        self._inputs: dict[str, list[Tensor]] = {}
        for call, x in run.inputs.items():
            self._inputs.setdefault(call.weight, []).append(x)
        self._found: dict[str, set[str | Place]] = {}

    def made_of(self, weight: str) -> set[str | Place]:
        """The layers, tensors and arguments that the inputs of a layer are made of."""
        if weight not in self._found:
            self._found[weight] = self._made_of(self._inputs[weight])
        return self._found[weight]

    def _made_of(self, tensors: Iterable[Tensor]) -> set[str | Place]:
        grads = [zip(self._names, gradients(x, 1, 0, self._sources), strict=True) for x in tensors if x.dim()]
        return {name for of_one in grads for name, grad in of_one if not _is_zero(grad)}

    def inner(self, entering: set[str], partial: set[str | Place]) -> tuple[set[str], set[str | Place]]:
        """Those of the layers ``entering`` whose inputs come from what has a part of its gradient on each rank; and all
        that has, then: whatever such an input is made of."""
        inner, partial = set[str](), set(partial)
        while found := {weight for weight in entering - inner if self.made_of(weight) & partial}:
            inner |= found
            partial |= {source for weight in found for source in self.made_of(weight)}
            entering = entering | {source for source in partial if isinstance(source, str) and source in self._inputs}
        return inner, partial


class _Search:
    """The search for regions in one model, for ``degree`` ranks."""

    def __init__(self, trial: Trial, degree: int):
        self._trial, self._degree = trial, degree
        self._varies = dict[str, str]()
        self._needs = self._find_needs()
        run = trial.plain()
        self._widths = {call.weight: x.shape[-1] for call, x in run.inputs.items()}
        self._shown = _reached(run, trial.others())
        self._unused = trial.unused()

    def _find_needs(self) -> dict[str, _Needs]:
        found: dict[str, _Needs] = {}
        first: dict[Call, torch.Size] | None = None
        for draw in range(_DRAWS):
            run = self._trial.plain(draw)
            shapes = {call: x.shape for call, x in run.inputs.items()}
            first = first or shapes
            for call in first.keys() | shapes.keys():
                if first.get(call) != shapes.get(call):
                    self._varies[call.weight] = "how many positions it gets depends on the data, as for experts"
            for call, x in run.inputs.items():
                if not self._trial.layers[call.weight].is_embedding:
                    self._add(found.setdefault(call.weight, _Needs()), run, x)
            if draw and not any(_has_holes(needs.outputs.values()) for needs in found.values() if not needs.by_all):
                break
        return found

    def _add(self, needs: _Needs, run: Run, x: Tensor) -> None:
        others = self._trial.others()
        is_even = x.shape[-1] % self._degree == 0
        for rank in range(self._degree):
            degree, part = (self._degree, rank) if is_even else (1, 0)
            grads = gradients(x, degree, part, [*run.leaves.values(), *others.values()])
            outputs = {
                c: _mask(g, -1) for c, g in zip(run.leaves, grads, strict=False) if g is not None and not _is_zero(g)
            }
            for call, mask in outputs.items():
                needs.outputs[call.weight] = _noted(needs.outputs.get(call.weight), mask, rank, self._degree)
            rest = zip(others, grads[len(run.leaves) :], strict=True)
            needs.tensors |= {name for name, grad in rest if not _is_zero(grad)}
            if not is_even or all(bool(mask.all()) for mask in outputs.values()):
                needs.by_all = True  # the parts of the other ranks are no different
                return

    def found(self) -> Found:
        regions, left = [], dict(self._varies)
        for rows in self._groups():
            region = self._region(rows)
            if isinstance(region, Region):
                regions.append(region)
            else:
                columns = set().union(*(self._needs[weight].partly() for weight in rows))
                left.update((weight, region) for weight in (*rows, *columns) if weight not in left)
        cut = {weight for region in regions for weight in (*region.columns, *region.rows)}
        for weight, layer in self._trial.layers.items():
            if weight not in cut and weight not in left and not layer.is_embedding and not layer.is_norm:
                left[weight] = self._why_left(weight)
        for name, function in self._trial.foreign.items():
            if ".parametrizations." in name:
                left[name] = "the weight of its layer is computed from it, by torch.nn.utils.parametrize"
            elif name not in self._trial.layers:
                left[name] = f"it is used by {function.strip('_')}, and not as the weight of a linear layer"
        return Found(regions, left, shown=self._shown, foreign=set(self._trial.foreign))

    def _why_left(self, weight: str) -> str:
        if weight in self._trial.foreign:
            return f"its weight is also used by {self._trial.foreign[weight]}"
        if (width := self._widths.get(weight, 0)) % self._degree:
            works = [degree for degree in range(2, 65) if width % degree == 0]
            others = f" (they are by {', '.join(map(str, works[:6]))})" if works else ""
            return f"its {width} inputs are not divisible by {self._degree}{others}"
        if (needs := self._needs.get(weight)) is not None and not needs.outputs:
            return "its inputs are made of no linear layer's outputs"
        return "the code before it mixes all of its inputs, and the code after it all of its outputs"

    def _groups(self) -> list[list[str]]:
        """Row-parallel candidates, those together that need parts of the outputs of one layer."""
        groups: list[tuple[set[str], list[str]]] = []
        for weight, needs in self._needs.items():
            if not (columns := needs.partly()):
                continue
            rows = [weight]
            for other in [group for group in groups if group[0] & columns]:
                groups.remove(other)
                columns, rows = columns | other[0], other[1] + rows
            groups.append((columns, rows))
        return [rows for _, rows in groups]

    def _region(self, rows: list[str]) -> Region | str:
        """The region of these row-parallel layers, or why there is none."""
        trial = self._trial
        partly = sorted(set().union(*(self._needs[weight].partly() for weight in rows)))
        for name in (*partly, *rows):
            if name in self._varies:
                return f"{name}: {self._varies[name]}"
            if name in trial.foreign:
                return f"{name} is used by {trial.foreign[name]} too"
            if measured := trial.measured & set(trial.layers[name].names):
                return f"the code reads the shape of {min(measured)}, which would be that of a part"
            if len({(use.bias, use.out_dim, use.further) for use in trial.uses.get(name, ())}) > 1:
                return f"{name} is the weight of layers of two kinds"
            for beside in trial.layers[name].names[1:]:
                if beside in trial.read or sum(beside in other.names for other in trial.layers.values()) > 1:
                    return f"{beside} is used outside of its layer too"
            if why := parts_differ(trial.layers[name], self._degree):
                return why
            function = trial.layers[name].function
            if name in rows and function and function[1].packing and self._widths[name] // self._degree % 2:
                return f"{name}: its inputs are stored two in a byte, and {self._degree} ranks would have half of one"
        module = _with_forward(trial.module, common_module((*partly, *rows)))
        if unused := [name for name in self._unused if _is_within(name, module)]:
            return f"{unused[0]} beside it was not used for the example, so where it leads to is not known"
        dims = self._detached(rows, module)
        outputs = {name: masks[0] for name, masks in dims.items() if isinstance(name, str) and name in trial.layers}
        whole = {name for name, masks in outputs.items() if _equal(masks)}
        reads = Reads(trial, module)
        inner, partial = reads.inner(outputs.keys() - rows, dims.keys() - (outputs.keys() - whole))
        whole |= {source for source in partial if isinstance(source, str) and source in trial.layers}
        rows_or_inner = {*rows, *inner}
        dims |= {source: [] for source in partial if source not in dims}
        columns: dict[str, Rows] = {}
        tensors: dict[str, Cut] = {}
        arguments: dict[Place, Cut] = {}
        for source, masks in dims.items():
            if isinstance(source, tuple):
                arguments[source] = _cut_or_whole(masks)
            elif source in trial.layers:
                if why := self._why_no_source(source, rows_or_inner, module):
                    return why
                if source not in whole:
                    if any(use.padding_idx is not None or use.has_options for use in trial.uses.get(source, ())):
                        return f"{source} is looked up with a padding index, or another option"
                    cut = parts_of(masks[0])
                    if isinstance(cut, str):
                        return f"{source}: {cut}"
                    columns[source] = cut
            elif not _is_within(source, module) or self._users(source) - rows_or_inner or source in self._shown:
                return f"{source} is also used outside of {module or 'the layers'}"
            else:
                tensors[source] = _cut_or_whole(masks)
        if both := [weight for weight in rows if weight in columns]:
            return f"both the inputs and the outputs of {both[0]} would be cut"
        if not columns:
            return "no part of its inputs depends on a part of some layer's outputs"
        return Region(module, columns, tuple(rows), tuple(sorted(whole)), tuple(sorted(inner)), tensors, arguments)

    def _users(self, tensor: str) -> set[str]:
        return {weight for weight, needs in self._needs.items() if tensor in needs.tensors}

    def _why_no_source(self, weight: str, rows: set[str], module: str) -> str:
        """Why a layer whose outputs a region uses cannot be part of it; "" if it can."""
        if not _is_within(weight, module):
            return f"outputs of {weight} come in by another way than the arguments of {module or 'the model'}"
        if others := [other for other, needs in self._needs.items() if other not in rows and weight in needs.outputs]:
            return f"outputs of {weight} are also used by {others[0]}"
        if weight in self._shown:
            return f"outputs of {weight} reach the output of the model, or what it keeps, other than through a layer"
        return ""

    def _detached(self, rows: list[str], module: str) -> dict[str | Place, list[Masks]]:
        """What the inputs of ``rows`` need when the arguments of ``module`` are cut off from what they were made of:
        of the outputs of a layer, by its weight; of all dims of another tensor, by its name, or of an argument."""
        found: dict[str | Place, list[Masks]] = {}
        others = self._trial.others()
        for draw in range(_DRAWS):
            run = self._trial.plain(draw, module)
            places = [(place, leaf) for place, leaves in run.arguments.items() for leaf in leaves]
            names = [*(call.weight for call in run.leaves), *others, *(place for place, _ in places)]
            sources = [*run.leaves.values(), *others.values(), *(leaf for _, leaf in places)]
            for x in (x for call, x in run.inputs.items() if call.weight in rows):
                for rank in range(self._degree):
                    for name, grad in zip(names, gradients(x, self._degree, rank, sources), strict=True):
                        if grad is None or _is_zero(grad):
                            continue
                        dims = [grad.dim() - 1] if name in self._trial.layers else range(grad.dim())
                        before = found.get(name, [None] * len(dims))
                        found[name] = [
                            _noted(masks, _mask(grad, dim), rank, self._degree)
                            for masks, dim in zip(before, dims, strict=True)
                        ]
            if draw and not _has_holes(masks[0] for name, masks in found.items() if name in self._trial.layers):
                break
        return found


def find_regions(trial: Trial, degree: int) -> Found:
    """The regions of a model for ``degree`` ranks, without settings: :func:`~shardwise.techniques.tp.search.certificate.certify` finds
    those, and shows whether a region is right."""
    return _Search(trial, degree).found()


def _reached(run: Run, others: Mapping[str, Tensor]) -> set[str]:
    """The layers whose outputs, and the other tensors, the model's output depends on other than through a layer."""
    outputs = [_real(out) for out in (*run.output, *(x for _, x in run.kept)) if out.requires_grad]
    names = [*(call.weight for call in run.leaves), *others]
    if not outputs or not names:
        return set()
    total = torch.stack([(out * weights_for(out)).sum() for out in outputs]).sum()
    sources = [*run.leaves.values(), *others.values()]
    grads = torch.autograd.grad(total, sources, retain_graph=True, allow_unused=True)
    return {name for name, grad in zip(names, grads, strict=True) if not _is_zero(grad)}


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def common_module(names: Iterable[str]) -> str:
    """The innermost module that all tensors of these names are in."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _with_forward(root: nn.Module, name: str) -> str:
    """The module of this name, or the innermost around it that has a forward: a ModuleList has none."""
    while name and has_no_forward(root.get_submodule(name)):
        name = name.rpartition(".")[0]
    return name


def _is_within(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _cut_or_whole(dims: list[Masks]) -> Cut:
    """The first dim along which each rank needs a part of its own."""
    for dim, masks in enumerate(dims):
        cut = parts_of(masks)
        if not isinstance(cut, str) and all(part.replicas == 1 for part in cut):
            return dim, cut
    return Whole()


def signature(name: str) -> str:
    """A name without the numbers of the blocks in it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
