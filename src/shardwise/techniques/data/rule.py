"""The rule of data parallelism: chooses the engine, the units, and the cut of every parameter for the recipe."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from shardwise.config.record import default_of
from shardwise.errors import PlanError, UnsupportedError
from shardwise.layout import CARVED, Layout
from shardwise.recipe import Cut, Draft, Recipe, Unit
from shardwise.recipe.draft import Dtypes
from shardwise.recipe.recipe import Engine
from shardwise.recipe.records import ROOT, Record
from shardwise.techniques.data.buffer_policies import buffer_policies, refuse_writes_of_rows
from shardwise.techniques.data.options import DDP, FSDP2_ONLY, Sharding
from shardwise.techniques.data.units import check_names, make_units, unit_of_params


class DataEntry(Record, frozen=True):
    """The recipe's data about data parallelism, other than units and cuts."""

    offload: bool = False  # parameters, gradients and optimizer state are kept in host memory
    pin_memory: bool = True  # ... page-locked, where there is an accelerator
    sync_every_microbatch: bool | Literal["reduce_scatter"] = False
    ddp: DDP | None = None  # how replicas reduce; None: the engine is fsdp2


def rule(draft: Draft, facts: Mapping[str, Any], *, sharding: Sharding, ddp: DDP) -> None:
    """Chooses the engine, makes the units, and cuts every parameter.

    Args:
        draft: the recipe so far.
        facts: ``units`` and ``reshard``: the units that a function, or the model itself, names; ``advancing``: modules
            with state that every forward advances; ``statistics``: modules with running statistics.
        sharding: the options of sharding.
        ddp: the options of replicas.

    Raises:
        PlanError: options that match no module, or a number of ranks to reshard over that does not divide dp_shard.
        UnsupportedError: DDP where parameters are cut or cast.
    """
    sharding = _with_units(sharding, facts)
    draft.engine, why = _engine(draft, sharding)
    is_cut = draft.engine == "fsdp2"
    draft.note("engine", f"{draft.engine}: {why}", option="sharding.engine")
    if is_cut:
        _check_reshard(draft.layout, sharding.reshard_after_forward)
        draft.units, notes = make_units(draft.anatomy, sharding, draft.casting.compute)
        draft.notes += notes
        if _is_whole(draft.layout, sharding):
            draft.units = tuple(msgspec.structs.replace(unit, reshard=False) for unit in draft.units)
            draft.note(
                "units",
                f"{draft.layout.text_of('fsdp')}: nothing is gathered; a TrainStep casts each unit once for all micro-batches",
            )
    else:
        check_names(draft.anatomy, sharding)
        cut = dict.fromkeys(cut.axis for cuts in draft.cuts.values() for cut in cuts)
        what = f"of every parameter what {', '.join(cut)} leaves a rank" if cut else "every parameter whole"
        why = f"replicated: DDP keeps {what}"
        draft.units = (Unit(name=ROOT, modules=(ROOT,), reshard=False, why=why),)
    _note_without_effect(draft, sharding, ddp)
    draft.homes = unit_of_params(draft.anatomy, draft.units)
    if is_cut:
        _cut_parameters(draft)
    draft.entries["data"] = DataEntry(
        offload=sharding.offload and is_cut,
        pin_memory=sharding.pin_memory,
        sync_every_microbatch=sharding.sync_every_microbatch if is_cut else False,
        ddp=None if is_cut else ddp,
    )
    draft.buffers |= buffer_policies(draft.anatomy, sharding, facts.get("advancing", ()))
    refuse_writes_of_rows(draft.buffers, draft.sum_axes)
    _note_state_of_forwards(draft, facts)


def layout_text(layout: Layout) -> str:
    """What the data-parallel axes do with a model, for people."""
    shard, copies, parts = layout.degree("fsdp"), layout.dp_replicate, []
    if shard > 1:
        parts.append(f"parameters, gradients and optimizer state are cut over {shard} ranks")
    if copies > 1:
        parts.append(f"{copies} {'groups hold a copy each' if shard > 1 else 'ranks hold a whole copy each'}")
    return ", and ".join(parts)


def heading(recipe: Recipe) -> list[str]:
    """The lines about data parallelism at the head of ``describe``."""
    if recipe.entry("data", DataEntry).offload:
        return ["offload: parameters, gradients and optimizer state are kept in host memory"]
    return []


def _with_units(sharding: Sharding, facts: Mapping[str, Any]) -> Sharding:
    """``sharding`` with the names of modules that its ``units`` were found to mean."""
    found: dict[str, Any] = {}
    if facts.get("units") is not None:
        found["units"] = tuple(facts["units"])
    if facts.get("reshard") is not None:
        found["reshard_after_forward"] = dict(facts["reshard"])
    return msgspec.structs.replace(sharding, **found) if found else sharding


def _engine(draft: Draft, sharding: Sharding) -> tuple[Engine, str]:
    layout, casts = draft.layout, next(iter(draft.needs_units), None)
    over = layout.text_of("fsdp")
    if sharding.engine == "fsdp2":
        return "fsdp2", 'asked for by Sharding(engine="fsdp2")'
    if sharding.engine == "ddp":
        if layout.dp_shard > 1 or casts:  # along other axes of fsdp replicas are as right as shards
            raise UnsupportedError(
                'Sharding(engine="ddp") with ' + (f"dp_shard={layout.dp_shard}" if layout.dp_shard > 1 else f"{casts}"),
                why="DDP keeps parameters whole and computes in the dtype they are stored in",
                fix='leave engine at "auto", or use dp_shard=1 and precision=None',
            )
        return "ddp", 'asked for by Sharding(engine="ddp")'
    if layout.degree("fsdp") > 1:
        return "fsdp2", f"{over} cuts parameters"
    if casts:
        return "fsdp2", f"{casts}, which DDP cannot do"
    if sharding.offload:
        return "fsdp2", "parameters are kept in host memory, which DDP cannot do"
    return "ddp", f"{over} and storage dtype = compute dtype: nothing to gather"


def _check_reshard(layout: Layout, given: bool | int | dict[str, bool | int]) -> None:
    for reshard in given.values() if isinstance(given, dict) else (given,):
        size, over = layout.degree("fsdp"), layout.text_of("fsdp")
        if not isinstance(reshard, bool) and size % reshard:
            divisors = [n for n in range(2, size + 1) if size % n == 0]
            raise PlanError(
                f"reshard_after_forward={reshard} on {over}",
                why="between forward and backward parameters stay cut over groups of that many ranks, so it must divide "
                f"the {size} ranks that share a copy",
                fix=f"use {' or '.join(map(str, divisors))}, or true" if divisors else "use true or false",
            )


def _note_without_effect(draft: Draft, sharding: Sharding, ddp: DDP) -> None:
    """Notes options that have no effect in this recipe: not an error, because they may have one under another layout or
    for another model."""
    idle: list[tuple[Sharding | DDP, str, str]] = []  # record, key, why
    if isinstance(sharding.buffers, str) and not any("float" in fact.dtype for fact in draft.anatomy.buffers.values()):
        idle.append((sharding, "buffers", "the model has no floating buffers"))
    if draft.engine == "ddp":
        idle += [(sharding, key, "DDP keeps whole copies") for key in FSDP2_ONLY]
    else:
        idle += [(ddp, key, "the engine is fsdp2") for key in DDP.__struct_fields__]
        timing = ("reshard_after_forward", "reshard_every", "prefetch")
        if _is_whole(draft.layout, sharding):
            idle += [(sharding, key, f"{draft.layout.text_of('fsdp')}, so nothing is gathered") for key in timing]
        elif len(draft.units) == 1:
            idle += [(sharding, key, "the root is the only unit, and it stays gathered") for key in timing]
        if sharding.sync_every_microbatch == "reduce_scatter" and draft.layout.dp_replicate == 1:
            idle.append((sharding, "sync_every_microbatch", "dp_replicate=1, so it is the same as true"))
    for record, key, because in idle:
        value = getattr(record, key)
        if value != default_of(type(record), key):
            option = f"{type(record).__name__.lower()}.{key}"
            draft.note(key, f"{value!r} has no effect here: {because}", option=option)


def _is_whole(layout: Layout, sharding: Sharding) -> bool:
    """Whether every rank has all of each parameter, in the memory that forward computes in."""
    return layout.degree("fsdp") == 1 and not sharding.offload


def _cut_parameters(draft: Draft) -> None:
    """Cuts dim 0 of every parameter over the fsdp axis; over what is left of it where a technique has cut it over an axis that is
    carved out of it. 0-dim ones stay whole and uncast, as they are not gathered."""
    for name, fact in draft.anatomy.params.items():
        if fact.shape:
            if fact.numel > 0:
                draft.cut(name, Cut(axis=_axis_of(draft.cuts.get(name, ())), dim=0))
            continue
        why, (storage, compute, reduce) = "0-dim: replicated, since there is nothing to cut", draft.dtypes[name]
        if (storage, storage) != (compute, reduce):
            why += f"; computed and reduced in {storage}, as it is stored"
            draft.dtypes[name] = Dtypes(storage, storage, storage)
        draft.note(name, why)


def _axis_of(cuts: Sequence[Cut]) -> str:
    left = [left for axis, (of, left) in CARVED.items() if of == "fsdp" and any(cut.axis == axis for cut in cuts)]
    return left[0] if left else "fsdp"


def _note_state_of_forwards(draft: Draft, facts: Mapping[str, Any]) -> None:
    """Notes modules whose state depends on the number of ranks: each rank runs only a part of a window's forwards."""
    for number, name in enumerate(facts.get("advancing", ())):
        draft.note(
            name,
            "warning: the power iteration of its spectral norm advances once per forward of a rank, so numbers depend on the number of ranks",
            warns=number == 0 and draft.layout.degree("loss") > 1,
        )
    found: Sequence[str] = facts.get("statistics", ())
    if not found:
        return
    first, *others = found
    more = (
        f" and those of {len(others)} more modules"
        if len(others) > 1
        else f" and those of {others[0]}"
        if others
        else ""
    )
    word = next((w for n, w in draft.buffers.items() if n.rpartition(".")[0] == first), "rank0")
    taken = {"mean": "their mean over the ranks", "rank0": "those of rank 0"}.get(word, f"what {word!r} makes of them")
    draft.note(
        first,
        f"its running statistics{more} are of the micro-batches that a rank runs, and each window ends with {taken} "
        f"(sharding.buffers={word}): they, evaluation and the saved weights depend on the number of ranks; training's losses do not",
    )
