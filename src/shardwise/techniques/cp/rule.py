"""Adds what the proof has found to the recipe: where sequences are cut over ``cp``, and what is exchanged."""

from collections.abc import Mapping
from typing import Any

from shardwise.layout import Layout
from shardwise.recipe import Draft, Edit, Recipe
from shardwise.recipe.describe import bytes_computed
from shardwise.recipe.records import Record
from shardwise.techniques.cp.options import ContextParallel

_WHY = {
    "cut": "its inputs are this rank's positions of them",
    "join": "the positions of all ranks, for the code behind the blocks, which mixes them",
    "island": "it mixes positions, so it runs on all of them on every rank",
    "attention": "its queries are this rank's, its keys and values those of all positions",
    "products": "it writes attention out: what its queries are multiplied with is of all positions",
    "keys": "it makes keys, or values: its output is of all positions",
    "drops": "of this rank's positions it drops other ones than the other ranks of theirs",
    "positions": "it makes positions itself: they are those of this rank",
}


class ContextParallelEntry(Record, frozen=True):
    """Data of context parallelism.

    Attributes:
        method: ``gather`` or ``ulysses``.
        order: ``zigzag`` or ``contiguous``.
        source, dim: path of the model's argument by which the length is known, and its dim of positions.
        extra: positions that the model adds before its blocks.
        given: paths of the model's arguments that were tensors when its code was run.
        lengths: those of them that have positions.
        output: ``rows``: each rank has the outputs of its positions; ``whole``: every rank has all of it.
        outputs: path of each tensor of the output that is on rows -> its dim of positions.
        masks_of_rows: masks that transformers makes are those of this rank's rows.
        draws: something is dropped out, in training.
        constants: path of each of the model's arguments that is a number, a text or a flag -> it, as text.
        example: samples and positions of the example.
        rows: positions of it that no rank exceeds.
        work: of the most loaded rank over the mean, in attention under a causal mask within the example's documents.
        is_packed: the example's samples have several documents.
        sent: numbers that a rank sends for each of its positions in all of the model's attention, forward and backward.
    """

    method: str = "gather"
    order: str = "zigzag"
    source: str = ""
    dim: int = 1
    extra: int = 0
    given: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()
    output: str = "rows"
    outputs: dict[str, int] = {}  # noqa: RUF012 - msgspec copies it
    masks_of_rows: bool = True
    draws: bool = False
    constants: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    sent: int = 0
    example: tuple[int, ...] = ()
    rows: int = 0
    work: float = 1.0
    is_packed: bool = False


def rule(draft: Draft, facts: Mapping[str, Any], *, context_parallel: ContextParallel) -> None:
    degree = draft.layout.cp
    if degree == 1:
        if context_parallel != ContextParallel():
            draft.note("context_parallel", "no effect: cp=1", option="context_parallel")
        return
    if not facts:
        draft.entries["cp"] = ContextParallelEntry()
        draft.note("context_parallel", "where sequences are cut is found by running the module")
        return
    found = facts["facts"]
    draft.entries["cp"] = ContextParallelEntry(
        method=facts["method"],
        order=facts["order"],
        source=facts["source"],
        dim=facts["dim"],
        extra=facts["extra"],
        given=tuple(facts["given"]),
        lengths=tuple(facts["lengths"]),
        output=found["output"],
        outputs=found["outputs"],
        masks_of_rows=found["masks_of_rows"],
        draws=found["draws"],
        constants=facts["constants"],
        sent=facts["sent"] // draft.layout.tp,
        example=tuple(facts["example"]),
        rows=facts["rows"],
        work=facts["work"],
        is_packed=facts["is_packed"],
    )
    axes = {True: "dp", False: "loss", None: ""}
    draft.sum_axes = {name: axes[is_all] for name, is_all in found["buffers"].items()}
    draft.edits += [
        Edit(module=module, technique="cp", action=action, args=args, why=_WHY[action])
        for module, action, args in _edits(found, facts["known"])
    ]
    if found["islands"]:
        first, *others = found["islands"]
        more = f", and {len(others)} more like it" if others else ""
        draft.note(
            first,
            f"runs on the whole sequence on every rank of cp={degree}{more}: {degree} times its work, and all of its memory. It mixes positions "
            "in another way than by attention",
            warns=True,
        )
    if found["output"] == "whole":
        draft.note(
            "context_parallel",
            "what the model returns is of all positions on every rank: the code behind its blocks mixes them (a pooled output, a loss of its own). "
            "For tokens, leave labels out of example= and use loss=sw.next_token_loss, with fused=True: then each rank has its positions' logits",
            option="context_parallel",
        )


def _edits(found: dict[str, Any], known: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Module, action and arguments of each edit. ``known``: module -> arguments of its blocks that the example had."""
    edits: list[tuple[str, str, dict[str, Any]]] = [
        (name, "cut", {"calls": dims, "known": [known.get(name, [])]}) for name, dims in found["cut"].items()
    ]
    edits += [(name, "join", {"dims": dims}) for name, dims in found["join"].items()]
    edits += [(name, "keys", {"dims": dims}) for name, dims in found["keys"].items()]
    edits += [(name, "island", {"inputs": given, "outputs": made}) for name, (given, made) in found["islands"].items()]
    edits += [
        (name, "attention", {"calls": [calls, found["queries"].get(name, [])], "seen": found["seen"].get(name, {})})
        for name, calls in found["attention"].items()
    ]
    edits += [
        (name, action, {"calls": calls, "seen": found["seen"].get(name, {})})
        for action in ("products", "positions")
        for name, calls in found[action].items()
    ]
    if found["draws"]:
        edits += [(name, "drops", {"dims": dims}) for name, dims in found["drops"].items()]
    return edits


def layout_text(layout: Layout) -> str:
    return f"the positions of every sample are cut over {layout.cp} ranks" if layout.cp > 1 else ""


def lines(recipe: Recipe) -> list[str]:
    """The lines about context parallelism at the head of ``describe``."""
    degree = recipe.layout["cp"]
    if degree == 1:
        return []
    entry = recipe.entry("cp", ContextParallelEntry)
    edits = recipe.edits_of("cp")
    num = {action: sum(edit.action == action for edit in edits) for action in _WHY}
    cut = [edit.module for edit in edits if edit.action == "cut"]
    blocks = [name for name in cut if not any(not name or other.startswith(f"{name}.") for other in cut)]
    calls = sum(len(edit.args["calls"][0]) for edit in edits if edit.action == "attention") + num["products"]
    how = {
        "gather": "keys and values are gathered, and gathered again in backward",
        "ulysses": "queries, keys and values change from positions to heads, and back behind it",
    }[entry.method]
    found = [
        f"context parallelism: {len(blocks)} blocks work on 1/{degree} of the positions of every sample ({entry.order}); in {calls} calls of "
        f"attention {how}: a rank sends {entry.sent:,} numbers for each of its positions, forward and backward"
    ]
    if entry.example and blocks:
        each = bytes_computed(recipe, entry.sent * entry.rows * entry.example[0]) // len(blocks)
        mask = "a causal mask within its documents" if entry.is_packed else "a causal mask"
        found.append(
            f"for a micro-batch as the example's ({entry.example[0]} samples of {entry.example[1]} positions) attention sends {each:,} bytes from a rank "
            f"for each block; under {mask} the most loaded rank of cp computes {entry.work:.2f} times the mean in it"
        )
    if num["island"]:
        found.append(
            f"{num['island']} modules run on the whole sequence on every rank, as they mix positions themselves"
        )
    if entry.output == "whole":
        found.append(f"the output is of all positions on every rank: its sums count 1/{degree} on each")
    return found
