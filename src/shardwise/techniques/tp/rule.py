"""Adds what a probe has found to the recipe: how parameters are cut over ``tp``, and the changes to modules."""

import math
import re
from collections.abc import Mapping
from typing import Any

from shardwise.layout import Layout
from shardwise.recipe import Cut, Draft, Edit, Part, Recipe
from shardwise.recipe.describe import bytes_computed
from shardwise.recipe.records import Record
from shardwise.techniques.tp.options import TensorParallel

_LITTLE = 0.2  # of the elements of all parameters: so small a part may not be what was expected
_WHY = {
    "column": "column-parallel: each rank computes a part of its outputs",
    "row": "row-parallel: each rank has a part of its inputs, and the outputs are summed",
    "whole": "whole on every rank, which uses all of its outputs for its part",
    "embedding": "vocabulary-parallel embedding: each rank has the rows of some tokens, and the outputs are summed",
    "head": "vocabulary-parallel head: each rank computes the logits of some tokens, and they are gathered",
    "attention": "computes its projections as linear layers, of which a rank has some heads",
    "norm": "a norm of all of its inputs: they are gathered, and each rank goes on with its part of the outputs",
    "reader": "gets all of its input, of which the code around it has a part",
    "part": "works on a rank's part of tensors that are not outputs of its layers",
    "set": "works on a rank's part: numbers of heads and the like",
    "sequence_cut": "its inputs are this rank's positions of them",
    "sequence_site": "gets all positions: those of the ranks are gathered before it, and gradients summed to the ranks' positions",
    "sequence_join": "what it returns is of all positions: those of the ranks are gathered",
    "sequence_drops": "of this rank's positions it drops other ones than the other ranks of theirs",
    "sequence_island": "it mixes positions, so it runs on all of them on every rank",
}


class SequenceParallelData(Record, frozen=True):
    """Data of sequence parallelism.

    Attributes:
        source, dim: path of the model's argument by which the length of its sequences is known, and its dim of positions.
        constants: path of each of the model's arguments that is a number, a text or a flag -> it, as text.
        ends: path of each tensor of the output with positions -> its dim of them.
        draws: something is dropped out, in training.
        example: samples and positions of the example.
        moved: numbers of each position that a forward gathers, or sums to rows, and its backward again.
        extra: positions that the model adds before its blocks.
    """

    source: str
    dim: int
    constants: dict[str, str]
    ends: dict[str, int]
    draws: bool
    moved: int
    example: tuple[int, ...] = ()
    extra: int = 0


class TensorParallelEntry(Record, frozen=True):
    """Data of tensor parallelism.

    Attributes:
        partial: parameters whose gradients on the ranks along ``tp`` are parts of a sum; of one that is cut, what several
            ranks hold of it.
        given: the arguments of the model that were tensors when its code was run to find what can be cut.
        plan: the plan that was asked for: its name, or what it says. It is here so that all ranks ask for the same.
        sequence: of sequence parallelism; None: without it.
    """

    partial: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    plan: str | dict[str, str] = "auto"
    sequence: SequenceParallelData | None = None


def rule(draft: Draft, facts: Mapping[str, Any], *, tensor_parallel: TensorParallel) -> None:
    if draft.layout.tp == 1:
        if tensor_parallel != TensorParallel():
            draft.note("tensor_parallel", "no effect: tp=1", option="tensor_parallel")
        return
    for name, (dim, parts) in facts.get("cuts", {}).items():
        draft.cut(name, Cut(axis="tp", dim=dim, parts=tuple(Part(size=size, replicas=of) for size, of in parts)))
    draft.entries["tp"] = TensorParallelEntry(
        partial=tuple(facts.get("partial", ())),
        given=tuple(facts.get("given", ())),
        plan=tensor_parallel.plan,
        sequence=SequenceParallelData(**facts["sequence"]) if "sequence" in facts else None,
    )
    draft.edits += [
        Edit(module=module, technique="tp", action=action, args=args, why=_WHY[action])
        for module, action, args in facts.get("edits", ())
    ]
    _add_notes(draft, facts)


def layout_text(layout: Layout) -> str:
    return f"layers are cut over {layout.tp} ranks with the same data" if layout.tp > 1 else ""


def lines(recipe: Recipe) -> list[str]:
    """The lines about tensor parallelism at the head of ``describe``."""
    degree = recipe.layout["tp"]
    if degree == 1:
        return []
    sizes = {name: math.prod(param.shape) for name, param in recipe.params.items()}
    cut = [name for name, param in recipe.params.items() if any(cut.axis == "tp" for cut in param.cuts)]
    share = sum(sizes[name] for name in cut) / max(sum(sizes.values()), 1)
    found = [
        f"tensor parallelism: {len(cut)} of {len(sizes)} parameters, {share:.0%} of their elements, are cut over tp={degree}; the others are "
        "whole on every rank"
    ]
    if (data := recipe.entry("tp", TensorParallelEntry).sequence) is not None:
        found += _lines_of_sequence(recipe, data, degree)
    return found


def _lines_of_sequence(recipe: Recipe, data: SequenceParallelData, degree: int) -> list[str]:
    edits = recipe.edits_of("tp")
    num = {action: sum(edit.action == action for edit in edits) for action in _WHY}
    gathers = num["sequence_site"] + num["sequence_join"] + sum(edit.args.get("gathers") is not None for edit in edits)
    scatters = sum(edit.args.get("scatters") is not None for edit in edits)
    whose = "this rank's positions" if recipe.layout["cp"] > 1 else "the positions of every sample"
    found = [
        f"sequence parallelism: between layers that are cut, {num['sequence_cut']} blocks work on 1/{degree} of {whose}; "
        f"positions are gathered at {gathers} places, and outputs of {scatters} row-parallel layers summed to them, as often in backward the other "
        f"way: a rank sends {2 * data.moved * (degree - 1) // degree:,} numbers for each position of a micro-batch"
    ]
    if data.example and num["sequence_cut"]:
        length = recipe.techniques["cp"]["rows"] if recipe.layout["cp"] > 1 else data.example[1]
        numbers = 2 * data.moved * (degree - 1) * -(-length // degree) * data.example[0]
        each = bytes_computed(recipe, numbers) // num["sequence_cut"]
        found.append(
            f"for a micro-batch as the example's ({data.example[0]} samples of {data.example[1]} positions) these exchanges send {each:,} bytes from a "
            "rank for each block, the ends of the stream among them"
        )
    if num["sequence_island"]:
        found.append(
            f"{num['sequence_island']} modules run on all positions on every rank, as they mix them themselves"
        )
    return found


def _add_notes(draft: Draft, facts: Mapping[str, Any]) -> None:
    """Says why layers are not cut, once for those that differ only in the number of their block."""
    degree, left = draft.layout.tp, facts.get("left", {})
    islands = [module for module, action, _ in facts.get("edits", ()) if action == "sequence_island"]
    if islands:
        more = f", and {len(islands) - 1} more" if len(islands) > 1 else ""
        draft.note(
            islands[0],
            f"runs on all positions on every rank of tp={degree}{more}, as without sequence_parallel: it mixes them outside of layers that are cut",
        )
    for text in facts.get("plan", ()):
        draft.note("tensor_parallel", text, option="tensor_parallel")
    if (per_node := facts.get("ranks_per_node")) is not None:
        draft.note(
            "tp",
            f"tp={degree} spans nodes of {per_node} {'rank' if per_node == 1 else 'ranks'}: four sums per block and micro-batch go over the network between them. "
            f"A degree that divides {per_node} stays within a node",
            option="layout",
            warns=True,
        )
    sizes = {name: fact.numel for name, fact in draft.anatomy.params.items()}
    computed = [edit for edit in facts.get("edits", ()) if edit[2].get("computed") is not None]
    share = sum(sizes[name] for name in facts.get("cuts", ())) / max(sum(sizes.values()), 1)
    if not facts.get("cuts") and not computed:
        why = next((f"{weight}: {why}" for weight, why in left.items()), "the example called no linear layer")
        draft.note(
            "tp",
            f"tp={degree} has no effect on this model: every rank of it does the same. No layer can be cut: {why}",
            option="layout",
            warns=True,
        )
    elif share < _LITTLE and not computed:
        draft.note(
            "tp",
            f"tp={degree} cuts {share:.0%} of the model; every rank has the rest whole, and computes all of it. Why layers stay "
            "whole: print(sw.describe(model))",
            option="layout",
            warns=True,
        )
    alike: dict[tuple[str, str], list[str]] = {}
    for weight, why in left.items():
        alike.setdefault((_without_numbers(weight), _without_numbers(why)), []).append(weight)
    for weights in alike.values():
        more = f", and {len(weights) - 1} like it" if len(weights) > 1 else ""
        draft.note(weights[0], f"whole on every rank of tp{more}: {left[weights[0]]}")


def _without_numbers(text: str) -> str:
    """A text without the numbers of the blocks in the names in it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", text)
