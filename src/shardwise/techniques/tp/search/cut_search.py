"""The regions of a whole model: searched in a few blocks of each kind, and the same in the others."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwise.errors import UnsupportedError
from shardwise.model.block_kinds import block_kinds, in_block, is_in_block
from shardwise.model.computed import computed_weights
from shardwise.model.isolated import Isolated
from shardwise.model.layers import is_norm
from shardwise.model.names import canonical_modules
from shardwise.model.trial import OUTSIDE, Trial, Uses
from shardwise.techniques.tp.search.certificate import Settings, certify, dropouts
from shardwise.techniques.tp.search.region_records import Found, Region
from shardwise.techniques.tp.search.regions import find_regions, gradients, signature
from shardwise.techniques.tp.search.settings import settled
from shardwise.techniques.tp.search.tables import add_tables, of_vocabulary
from shardwise.techniques.tp.search.whole_model import forget_drawn, holds_for_all

_MOST_TOGETHER = 20  # regions among which every choice is compared
_HEADS = re.compile(r"heads?$")  # num_heads, n_head, num_key_value_heads
_SEARCHED = 2  # blocks of a kind: what one hands on to the next would show


def search(
    module: nn.Module, call: Callable[[nn.Module], Any], degree: int, allowed: frozenset[str] | None = None
) -> Found:
    """The regions of ``module`` for ``degree`` ranks that share its layers.

    Args:
        module: any module, on meta or not; it is not changed.
        call: ``call(copy)`` runs a copy of it once on an example and returns its output.
        degree: how many ranks share a layer.
        allowed: weights of the layers that may be cut; None: all.

    Raises:
        UnsupportedError: the module cannot be copied, or does not run.
    """
    try:
        return _complete(module, Isolated(module, call), degree, allowed)
    finally:
        forget_drawn()


def _complete(module: nn.Module, call: Isolated, degree: int, allowed: frozenset[str] | None) -> Found:
    computed = computed_weights(module)
    try:
        found = _search(module, call, degree, allowed, frozenset(computed))
    except Exception:  # of the user's code, which may look at what its weights are computed from
        if not computed:
            raise
        computed = {}
        found = _search(module, call, degree, allowed, frozenset())
    if unfit := _unfit(module, found, computed):
        rest = frozenset(found.layers if allowed is None else allowed) - unfit.keys()
        found = _search(module, call, degree, rest, frozenset(computed))
        found.left |= unfit
    found.computed = computed
    return found


def _unfit(module: nn.Module, found: Found, computed: Container[str]) -> dict[str, str]:
    """Layers in regions that must stay whole for reasons that no run shows -> why."""
    unfit = {}
    modules = dict(canonical_modules(module))
    for region in found.regions:
        for weight in (*region.layers, *region.readers):
            layer, callers = found.layers[weight], found.callers[weight]
            if weight in computed and list(callers) != [layer.module]:
                unfit[weight] = "it is computed, and another module than its own uses it"
            if OUTSIDE in callers:
                unfit[weight] = f"{OUTSIDE} calls it, outside of the forward"
                continue
            for name in callers:
                # In a run that returns random outputs no gradient passes through a layer, and so none through these.
                if hooked := _with_backward_hooks(modules, name, region.module):
                    unfit[weight] = f"{hooked} has a backward hook, which would be given the gradient of a part"
    return unfit


def _with_backward_hooks(modules: Mapping[str, nn.Module], name: str, within: str) -> str | None:
    """The module ``name``, or one around it within the module ``within``, if it has hooks on its backward."""
    while name and name != within:
        if modules[name]._backward_hooks or modules[name]._backward_pre_hooks:
            return name
        name = name.rpartition(".")[0]
    return None


def _search(
    module: nn.Module,
    call: Callable[[nn.Module], Any],
    degree: int,
    allowed: frozenset[str] | None,
    computed: frozenset[str],
) -> Found:
    """:func:`search`, whose regions may have layers that must stay whole for reasons that no run shows."""
    others = {blocks[0]: blocks[_SEARCHED:] for blocks in block_kinds(module) if len(blocks) > _SEARCHED}
    if allowed is not None and not all(_treats_alike(allowed, blocks) for blocks in block_kinds(module)):
        others = {}
    uses: Uses = {}
    if others:
        try:
            without = frozenset(name for names in others.values() for name in names)
            found = _repeated(_with_norms(module, call, degree, without, allowed, computed), block_kinds(module))
        except UnsupportedError:  # its code counts its blocks
            found = None
        if found is not None:
            trial = _of_whole(module, call, found, computed)
            if holds_for_all(trial, degree, found, uses):
                add_tables(module, trial, uses, degree, found, allowed)
                return found
    found = _with_norms(module, call, degree, frozenset(), allowed, computed)
    trial, uses = _of_whole(module, call, found, computed), {}
    with trial.noting(uses) as note:
        for is_training in (False, True):
            trial.set_training(is_training)
            trial.run(note=note, watch=lambda *_: None)
    add_tables(module, trial, uses, degree, found, allowed)
    return found


def _of_whole(module: nn.Module, call: Callable[[nn.Module], Any], found: Found, computed: frozenset[str]) -> Trial:
    norms = frozenset(weight[:-1] for region in found.regions for weight in region.layers if is_norm(weight))
    return Trial(module, call, norms=norms, foreign=frozenset(found.foreign), computed=computed)


def _treats_alike(allowed: frozenset[str], blocks: list[str]) -> bool:
    """Whether the same layers of each block may be cut."""
    inside = [{in_block(name, block, "") for name in allowed if is_in_block(name, block)} for block in blocks]
    return all(names == inside[0] for names in inside)


def _with_norms(
    module: nn.Module,
    call: Callable[[nn.Module], Any],
    degree: int,
    without: frozenset[str],
    allowed: frozenset[str] | None,
    computed: frozenset[str],
) -> Found:
    """The regions of a model; also those with a norm over the whole width between two layers, if that cuts more."""
    trial = Trial(module, call, without=without, computed=computed)
    found = find_certified(trial, degree, allowed)
    norms = _norms_of_one_layer(trial, found) if found.left else frozenset()
    if not norms:
        return found
    try:
        other = Trial(module, call, without=without, norms=norms, computed=computed)
        with_norms = find_certified(other, degree, allowed)
    except (UnsupportedError, TypeError):  # one of them is more than a function of one tensor
        return found
    sizes = [sum(_numel(trial, region) for region in each.regions) for each in (found, with_norms)]
    return with_norms if sizes[1] > sizes[0] else found


def _norms_of_one_layer(trial: Trial, found: Found) -> frozenset[str]:
    """Modules whose parameters are as wide as the outputs of a layer that is not cut, from which alone their input is made:
    norms of queries and keys over all heads."""
    given, has_any = dict[str, Tensor](), False
    readers = trial.readers()
    left = trial.layers.keys() & found.left.keys()
    widths = {trial.module.get_parameter(weight).shape[trial.layers[weight].out_dim] for weight in left}
    with contextlib.ExitStack() as stack:
        for name, module in trial.module.named_modules():
            params = list(module.parameters())
            sizes = {tuple(param.shape) for param in params}
            if not name or module._modules or len(sizes) != 1 or len(*sizes) != 1 or params[0].shape[0] not in widths:
                continue
            if not any(readers.get(trial.name_of(param) or "", set()) - {name} for param in params):
                hook = functools.partial(_note_input, given, name)
                stack.callback(module.register_forward_pre_hook(hook).remove)
                has_any = True
        if not has_any:
            return frozenset()
        run = trial.run()
    norms = set[str]()
    for name, x in given.items():
        grads = zip(run.leaves, gradients(x, 1, 0, run.leaves.values()), strict=True)
        made_of = {call.weight for call, grad in grads if grad is not None and bool((grad != 0).any())}
        width = next(trial.module.get_submodule(name).parameters()).shape[0]
        if len(made_of) == 1 and made_of <= found.left.keys() and x.shape[-1] == width:
            (weight,) = made_of
            if trial.module.get_parameter(weight).shape[trial.layers[weight].out_dim] == width:
                norms.add(name)
    return frozenset(norms)


def _note_input(given: dict[str, Tensor], name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
    if len(args) == 1 and isinstance(args[0], Tensor) and args[0].requires_grad:
        given[name] = args[0]


def _repeated(found: Found, kinds: list[list[str]]) -> Found | None:
    """What was found, in the blocks that were left out too; None if a region is in several blocks, or the blocks that
    were searched differ."""
    regions, left, layers, callers = list(found.regions), dict(found.left), dict(found.layers), dict(found.callers)
    shares, foreign = set(found.shares_input), set(found.foreign)
    for blocks in (blocks for blocks in kinds if len(blocks) > _SEARCHED):
        of_each = []
        for block in blocks[:_SEARCHED]:
            inside = [region for region in found.regions if any(is_in_block(name, block) for name in _names(region))]
            if not all(is_in_block(name, block) for region in inside for name in _names(region)):
                return None
            of_each.append([_moved(region, block, blocks[0]) for region in inside])
        if any(other != of_each[0] for other in of_each[1:]):
            return None
        for block in blocks[_SEARCHED:]:
            regions += [_moved(region, blocks[0], block) for region in of_each[0]]
            for weight, why in found.left.items():
                if is_in_block(weight, blocks[0]):
                    left[in_block(weight, blocks[0], block)] = why
            foreign |= {in_block(name, blocks[0], block) for name in found.foreign if is_in_block(name, blocks[0])}
            shares |= {in_block(weight, blocks[0], block) for weight in shares if is_in_block(weight, blocks[0])}
            for layer in found.layers.values():
                if is_in_block(layer.weight, blocks[0]):
                    bias = layer.bias and in_block(layer.bias, blocks[0], block)
                    further = tuple(x._replace(name=in_block(x.name, blocks[0], block)) for x in layer.further)
                    moved = layer._replace(weight=in_block(layer.weight, blocks[0], block), bias=bias, further=further)
                    layers[moved.weight] = moved
                    callers[moved.weight] = tuple(
                        in_block(name, blocks[0], block) for name in found.callers.get(layer.weight, ())
                    )
    return Found(regions, left, layers, callers, shares, found.shown, foreign)


def _names(region: Region) -> list[str]:
    settings = [f"{module}." for module, _ in region.settings]
    return [f"{region.module}.", *region.columns, *region.rows, *region.whole, *region.tensors, *settings]


def _moved(region: Region, block: str, other: str) -> Region:
    def moved(name: str) -> str:
        return in_block(name, block, other)

    return replace(
        region,
        module=moved(region.module),
        columns={moved(name): cut for name, cut in region.columns.items()},
        rows=tuple(map(moved, region.rows)),
        whole=tuple(map(moved, region.whole)),
        inner=tuple(map(moved, region.inner)),
        tensors={moved(name): cut for name, cut in region.tensors.items()},
        settings={(moved(module), attr): value for (module, attr), value in region.settings.items()},
        dropouts=tuple(map(moved, region.dropouts)),
        readers=tuple(map(moved, region.readers)),
    )


# ---- which regions are cut beside each other --------------------------------------------------------------------------


def find_certified(trial: Trial, degree: int, allowed: frozenset[str] | None = None) -> Found:
    """The regions for ``degree`` ranks that can be cut together, with their settings; and for every other linear layer
    that was called the reason why it stays as it is. ``allowed``: as of :func:`search`."""
    found, training = find_regions(trial, degree), trial.in_training()
    # Where the mode makes no difference, what is right in training is right in eval mode.
    modes = (training,) if trial.plain().is_like(training.plain()) else (training, trial)
    vocabulary = set(of_vocabulary(trial.module, trial.uses, found.shown))
    candidates = [region for region in found.regions if not vocabulary & set(region.layers)]
    left, written = dict(found.left), {*trial.written, *training.written}
    if allowed is not None:
        candidates = _allowed(candidates, allowed, left)
    shown = dict[str, Region]()  # by the row-parallel layers, which no two candidates have in common
    known = dict[str, Settings]()
    while waiting := [region for region in _largest(trial, candidates) if region.rows[0] not in shown]:
        for region in waiting:
            kind = signature("; ".join(region.layers))
            first = {(region.module + place, attr): value for (place, attr), value in known.get(kind, {}).items()}
            if name := _written_in(region, written):
                result: Region | str = f"{name} in it is written when it runs"
            elif isinstance(result := settled(training, region, degree, first), str):
                result = result if len(modes) == 1 else f"in training mode: {result}"
            elif trial in modes and (why := certify(trial, [result], degree)):
                result = f"in eval mode: {why}"
            if isinstance(result, str):
                candidates.remove(region)
                left.update((weight, result) for weight in region.layers)
                continue
            shown[region.rows[0]] = result
            settings = result.settings.items()
            known[kind] = {(name.removeprefix(region.module), attr): value for (name, attr), value in settings}
    kept = [shown[region.rows[0]] for region in _largest(trial, candidates)]
    if any(certify(mode, kept, degree, jointly=True) for mode in modes):
        kept = _together(modes, kept, degree, left)
    if len(rest := _with_dropouts(training, kept, degree, left)) < len(kept):
        rest = _together(modes, rest, degree, left)
    kept = [region for region in rest if _cuts_more_than_norms(region, rest)]
    cut = {weight for region in kept for weight in region.layers}
    beside = "the layers that it could be cut with are cut with others"
    left = {name: why for name, why in found.left.items() if name not in trial.layers} | {
        weight: left.get(weight, beside)
        for weight, layer in trial.layers.items()
        if weight not in cut and not layer.is_embedding and not layer.is_norm
    }
    for weight, why in left.items():
        if not why.startswith("the plan ") and (heads := _heads_that_do_not_divide(trial.module, weight, degree)):
            left[weight] = heads
    order = {weight: number for number, weight in enumerate(trial.layers)}
    kept.sort(key=lambda region: order[region.rows[0]])
    callers = trial.callers()
    for weight, names in training.callers().items():
        callers[weight] = tuple(dict.fromkeys((*callers.get(weight, ()), *names)))
    return Found(kept, left, dict(trial.layers), callers, _sharing(trial, kept), found.shown, found.foreign)


def _heads_that_do_not_divide(root: nn.Module, weight: str, degree: int) -> str:
    """That the module around a layer has a number of heads which ``degree`` ranks do not divide; "" if it has none."""
    module = ".".join(weight.split(".")[:-2])
    for name, value in vars(root.get_submodule(module)).items():
        if _HEADS.search(name) and type(value) is int and value > 1 and value % degree:
            works = ", ".join(str(other) for other in range(2, value + 1) if value % other == 0)
            shown = f"{module}.{name}" if module else name
            return f"{shown} is {value}, which {degree} ranks do not divide (works: {works})"
    return ""


def _allowed(regions: Sequence[Region], allowed: frozenset[str], left: dict[str, str]) -> list[Region]:
    """The regions of which every layer may be cut; of the others the reason why not."""
    kept = []
    for region in regions:
        layers = [weight for weight in (*region.columns, *region.rows) if not is_norm(weight)]
        if others := [weight for weight in layers if weight not in allowed]:
            why = f"the plan does not cut {others[0]}, which is cut with it"
            left.update((weight, "the plan does not cut it" if weight in others else why) for weight in layers)
        else:
            kept.append(region)
    return kept


def _cuts_more_than_norms(region: Region, regions: Sequence[Region]) -> bool:
    """Whether a region ends in layers; or in norms whose outputs are cut by another region."""
    sliced = {weight for other in regions for weight in other.columns}
    return any(not is_norm(weight) or weight in sliced for weight in region.rows)


def _sharing(trial: Trial, regions: Sequence[Region]) -> set[str]:
    """The layers that regions start from of which the next one called gets the same input."""
    starts = {weight for region in regions for weight in region.sources - {*region.rows, *region.inner}}
    starts = {weight for weight in starts if not is_norm(weight)}
    run = trial.plain()
    inputs = [(call.weight, x, run.versions[call]) for call, x in run.inputs.items() if call.weight in starts]
    return {
        weight
        for (weight, x, version), (_, following, its_version) in itertools.pairwise(inputs)
        if x is following and version == its_version
    }


def _written_in(region: Region, written: set[str]) -> str:
    """A buffer within the region's module that a run writes, perhaps with what a rank has a part of; "" if there is none."""
    return next((name for name in sorted(written) if not region.module or is_in_block(name, region.module)), "")


def _with_dropouts(training: Trial, regions: Sequence[Region], degree: int, left: dict[str, str]) -> list[Region]:
    """The regions with their dropouts; not those in which dropout is applied both to parts and to what is whole."""
    dropped = dropouts(training, regions, degree)
    kept: list[Region] = []
    for region in regions:
        of_parts = tuple(weight for weight in region.layers if True in dropped.get(weight, ()))
        if both := [weight for weight in of_parts if False in dropped[weight]]:
            why = f"after {both[0]}, dropout is applied both to a rank's part and to what every rank has whole"
            left.update((weight, why) for weight in region.layers)
            continue
        kept.append(replace(region, dropouts=of_parts))
    return kept


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
    weights = {weight for weight in (*region.columns, *region.rows) if not is_norm(weight)}
    return sum(trial.module.get_parameter(weight).numel() for weight in weights)


def _clash(region: Region, other: Region) -> bool:
    """Whether two regions would cut the inputs and the outputs of one layer."""
    both = (region.sources & {*other.rows}) | ({*region.rows} & other.sources)
    return any(not is_norm(weight) for weight in both)


def _together(modes: Sequence[Trial], regions: Sequence[Region], degree: int, left: dict[str, str]) -> list[Region]:
    """Those of the regions that are right when all of them are cut, each tried beside those before it."""
    kept: list[Region] = []
    for region in regions:
        tried = [*kept, region]
        if why := next((why for mode in modes if (why := certify(mode, tried, degree, jointly=True))), ""):
            left.update((weight, f"beside the other layers: {why}") for weight in region.layers)
        else:
            kept.append(region)
    return kept
