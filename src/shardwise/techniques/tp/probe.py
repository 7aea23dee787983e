"""What can be cut in a module: found by running a copy of it on an example, without weights."""

import functools
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError, UnsupportedError, first_line
from shardwise.model.attention import attentions
from shardwise.model.calling import line_of, tensors_given
from shardwise.model.layers import is_norm
from shardwise.recipe import Draft
from shardwise.techniques.one_rank import found_by_one_rank
from shardwise.techniques.technique import Example
from shardwise.techniques.tp.given_plan import differences, is_met, own_kinds, plan_for, refuse_uncut
from shardwise.techniques.tp.options import TensorParallel
from shardwise.techniques.tp.search.cut_search import search
from shardwise.techniques.tp.search.region_records import Cut, Found, Region, Rows, Whole
from shardwise.techniques.tp.sequence_probe import add_sequence
from shardwise.world import World

Facts = dict[str, Any]


def probe(module: nn.Module, example: Example, draft: Draft, world: World, *, tensor_parallel: TensorParallel) -> Facts:
    """What tensor parallelism changes in ``module``; see :func:`facts_of`. Nothing if ``tp`` is 1, but a plan is read.

    Rank 0 finds it for all ranks: they have the same module, which is checked later.

    Raises:
        UnsupportedError: the module cannot be copied, or does not run on the example; a layer that the plan names cannot
            be cut so.
        UsageError: there is no example, and none can be guessed.
        PlanError: a plan that does not fit the module.
    """
    if draft.layout.tp == 1:
        if tensor_parallel != TensorParallel():
            plan_for(module, draft.anatomy, tensor_parallel)  # a mistake in it is an error on one process too
        return {}
    find = functools.partial(_facts, module, example, draft, world, tensor_parallel)
    return found_by_one_rank(world, example, "the search for layers to cut over tp", find)


def _facts(module: nn.Module, example: Example, draft: Draft, world: World, option: TensorParallel) -> Facts:
    plan = plan_for(module, draft.anatomy, option)
    found, given = example.shows(functools.partial(_found, module, draft.layout.tp, None))
    notes = []
    if plan is not None:
        notes.append(f"plan: {plan.source}; how its layers are cut was found in the code, and proved")
        if not is_met(found, plan):
            others = differences(found, plan.kinds)
            found, given = example.shows(functools.partial(_found, module, draft.layout.tp, plan.cut))
            refuse_uncut(found, plan, draft.layout.tp)
            notes.append(f'plan="all" would be what the code allows. This plan is another: {"; ".join(others)}')
    elif (own := own_kinds(module, draft.anatomy)) and (others := differences(found, own)):
        notes.append(f"plan: what the code allows. The model's own tp_plan is another: {'; '.join(others)}")
    facts = {**facts_of(found, draft.anatomy.params), "given": sorted(given), "plan": notes}
    if world.size > world.local_size and world.local_size % draft.layout.tp:
        facts["ranks_per_node"] = world.local_size
    if option.sequence_parallel:
        with torch.inference_mode(False):
            rows = add_sequence(facts, module, example, draft.layout.tp, found)
        draft.kept["rows"] = rows  # on the rank that looks: for a technique that cuts sequences before
    cut = {weight for region in found.regions for weight in region.layers}
    facts["edits"] += [[name, "attention", {}] for name in attentions(module) if f"{name}.in_proj_weight" in cut]
    return facts


_NO_COMPLEX = "leave tp out: the search for what can be cut takes real sums; or keep the complex parameters as real and imaginary part"


def _found(
    module: nn.Module, degree: int, allowed: frozenset[str] | None, run: Callable[[nn.Module], Any]
) -> tuple[Found, set[str]]:
    """What can be cut, of the layers that are ``allowed``, and the arguments of the model that were tensors."""
    given: set[str] = set()

    def noting(copy: nn.Module) -> Any:
        handle = copy.register_forward_pre_hook(
            lambda model, args, kwargs: given.update(tensors_given(model, args, kwargs)), with_kwargs=True
        )
        try:
            return run(copy)
        finally:
            handle.remove()

    try:
        with torch.inference_mode(False), torch.enable_grad():
            return search(module, noting, degree, allowed), given
    except ShardwiseError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"tp={degree} of a {type(module).__name__}",
            why=f"its gradients were to show what can be cut: {type(error).__name__}: "
            f"{first_line(error)}{line_of(error)}",
            fix=_NO_COMPLEX
            if any(tensor.is_complex() for tensor in module.parameters())
            else "turn its own checkpointing off (remat= of parallelize does that), and what writes a buffer with gradients; give an autograd "
            "function of its own all weights that its backward computes with as arguments of apply; or leave tp out",
        ) from error


def facts_of(found: Found, parameters: Collection[str]) -> Facts:
    """What a search has found, as JSON data. ``parameters``: names of those of the module.

    Returns:
        ``cuts``: parameter -> dim and parts, ``[size, replicas]`` each; no parts: cut evenly.
        ``partial``: parameters whose gradients on the ranks are parts of a sum.
        ``edits``: module, action and arguments of each change.
        ``left``: weight of a layer that is not cut -> why.
    """
    facts: Facts = {"cuts": {}, "partial": [], "edits": [], "left": found.left}
    for region in found.regions:
        for weight in region.layers:
            if not is_norm(weight):
                _add_layer(facts, found, region, weight, found.computed.get(weight))
        _add_tensors(facts, region, parameters)
        _add_readers(facts, found, region)
        numbers: dict[str, dict[str, int]] = {}
        for (module, attr), value in region.settings.items():
            numbers.setdefault(module, {})[attr] = value
        facts["edits"] += [[module, "set", values] for module, values in numbers.items()]
    _add_norms(facts, found, parameters)
    _add_tables(facts, found)
    return facts


def _add_layer(facts: Facts, found: Found, region: Region, weight: str, originals: tuple[str, ...] | None) -> None:
    """Adds one layer; see :class:`~shardwise.techniques.tp.layers.CutLayer` for the arguments. ``originals``: from which its
    weight is computed, on every rank; its gradient there is that of a part."""
    layer = found.layers[weight]
    action = "row" if weight in region.rows else "column" if weight in region.columns else "whole"
    rows = region.columns[weight] if action == "column" else ()
    cut = {"column": [layer.out_dim, _as_json(rows)], "row": [1 - layer.out_dim, []], "whole": None}[action]
    if cut is not None and originals is None:
        facts["cuts"][weight] = cut
    if action == "column" and layer.bias is not None:
        facts["cuts"][layer.bias] = [0, _as_json(rows)]
    partial = list(originals or ())
    if action == "whole" or any(part.replicas > 1 for part in rows):
        partial += [name for name in (weight, layer.bias) if name is not None and not (originals and name == weight)]
    for each in layer.further:
        dim = {"column": each.dim("out"), "row": each.dim("in"), "whole": None}[action]
        if dim is not None:
            facts["cuts"][each.name] = [dim, _as_json(rows)]
        if dim is None or any(part.replicas > 1 for part in rows):
            partial.append(
                each.name
            )  # whole beside what is cut, or held by several ranks: a part of the gradient comes to it
    facts["partial"] += partial
    callers = list(found.callers[weight])
    arguments = {
        "weight": weight,
        "bias": layer.bias,
        "out_dim": layer.out_dim,
        "embedding": layer.is_embedding,
        "callers": [] if callers == [layer.module] else callers,
        "sums_input": action != "row" and weight not in region.inner,
        "shares_input": weight in found.shares_input,
        "sums_output": action == "row" and weight in region.whole,
        "drops_part": weight in region.dropouts,
    }
    if layer.function is not None:
        arguments["drops_input"] = action == "row" and layer.function[1].dropout > 0
    if originals is not None:
        arguments["computed"] = cut
    facts["edits"].append([layer.module, action, arguments])


def _add_readers(facts: Facts, found: Found, region: Region) -> None:
    """Adds the layers that are not cut and get all of an argument of which others have a part."""
    cut = {weight for other in found.regions for weight in other.layers}
    for weight in (weight for weight in region.readers if weight not in cut):
        layer, callers = found.layers[weight], list(found.callers[weight])
        arguments = {
            "weight": weight,
            "bias": layer.bias,
            "out_dim": layer.out_dim,
            "callers": [] if callers == [layer.module] else callers,
        }
        if weight in found.computed:
            arguments["computed"] = None
        facts["edits"].append([layer.module, "reader", arguments])


def _add_norms(facts: Facts, found: Found, parameters: Iterable[str]) -> None:
    """Adds norms that are taken for layers: they compute all of their outputs on every rank."""
    gathered = {weight for region in found.regions for weight in region.rows if is_norm(weight)}
    sliced = {weight: cut for region in found.regions for weight, cut in region.columns.items() if is_norm(weight)}
    for weight in sorted(gathered | sliced.keys()):
        parts = _as_json(sliced[weight]) if weight in sliced else None
        drops = any(weight in region.dropouts for region in found.regions)
        values = {"gathers": weight in gathered, "parts": parts, "drops_part": drops}
        facts["edits"].append([weight[:-1], "norm", values])
        if weight in sliced:
            facts["partial"] += [name for name in parameters if name.startswith(weight)]


def _add_tables(facts: Facts, found: Found) -> None:
    """Adds embeddings and heads that are cut by tokens."""
    for table in found.tables:
        facts["cuts"][table.weight] = [table.dim, []]
        if table.bias is not None:
            facts["cuts"][table.bias] = [0, []]
        for each in table.further:
            if (dim := each.dim("out")) is not None:
                facts["cuts"][each.name] = [dim, []]
            else:  # a rank has its gradient from the tokens that it makes numbers for
                facts["partial"].append(each.name)
        of_table = {"weight": table.weight, "bias": table.bias, "dim": table.dim}
        for module, padding_idx in table.embeddings.items():
            facts["edits"].append([module, "embedding", {**of_table, "bias": None, "padding_idx": padding_idx}])
        facts["edits"] += [[module, "head", of_table] for module in table.heads]


def _add_tensors(facts: Facts, region: Region, parameters: Container[str]) -> None:
    """Adds the tensors between the layers, and the arguments of the region's module."""
    buffers = {}
    for name, cut in region.tensors.items():
        if name not in parameters:
            if not isinstance(cut, Whole):
                buffers[name] = _cut(cut)
        elif isinstance(cut, Whole):
            facts["partial"].append(name)
        else:
            facts["cuts"][name] = _cut(cut)
    arguments = [[list(place), _cut(cut)] for place, cut in region.arguments.items()]
    narrowed = [list(place) for place in region.narrowed]
    if buffers or arguments or narrowed:
        values = {"buffers": buffers, "arguments": arguments, "narrowed": narrowed}
        facts["edits"].append([region.module, "part", values])


def _as_json(rows: Rows) -> Any:
    return [[part.size, part.replicas] for part in rows]


def _cut(cut: Cut) -> Any:
    """Dim and parts of a cut; None: whole."""
    return None if isinstance(cut, Whole) else [cut[0], _as_json(cut[1])]
