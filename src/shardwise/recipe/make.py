"""From an anatomy, a layout and options to a recipe: every choice is made here, with its reason."""

import hashlib

import msgspec

from shardwise.config.options import DDP, FSDP2_ONLY, Compile, Precision, Remat, Sharding, default_of
from shardwise.errors import PlanError, UnsupportedError
from shardwise.layout import Layout
from shardwise.recipe.dtypes import HALVES
from shardwise.recipe.edits import make_edits
from shardwise.recipe.parts import Parts
from shardwise.recipe.recipe import Engine, Recipe, check_recipe
from shardwise.recipe.records import ROOT, Anatomy, Buffer, Cut, Note, Param, TensorFact, Unit
from shardwise.recipe.units import check_names, make_units, unit_of_params

__all__ = ["fingerprint_of", "make_recipe"]


def make_recipe(
    anatomy: Anatomy,
    layout: Layout,
    *,
    precision: Precision,
    sharding: Sharding,
    ddp: DDP | None = None,
    remat: Remat | None = None,
    compile: Compile | None = None,
) -> Recipe:
    """The recipe of a module under a layout: pure, the same on every rank.

    Raises:
        PlanError: options that name no module or undo each other, or a number of ranks to reshard over that does not divide dp_shard.
        UnsupportedError: DDP where parameters are cut or cast.
    """
    parts = Parts(anatomy, precision)
    engine, why = _engine(parts, layout, sharding)
    notes = [Note(name="engine", why=f"{engine}: {why}", option="sharding.engine")]
    if engine == "fsdp2":
        _check_reshard(layout, sharding.reshard_after_forward)
        units, unit_notes = make_units(anatomy, sharding, precision.compute)
        notes += unit_notes
    else:
        check_names(anatomy, sharding)
        units = (Unit(name=ROOT, modules=(ROOT,), reshard=False, why="replicated: DDP keeps every parameter whole"),)
    notes += _without_effect(anatomy, units, engine, layout, precision, sharding, ddp or DDP())
    homes = unit_of_params(anatomy, units)
    params = {name: _param(fact, homes[name], engine, parts, notes, name) for name, fact in anatomy.params.items()}
    notes += _lossy(params, units, precision)
    recipe = Recipe(
        layout=layout.degrees,
        engine=engine,
        module_class=anatomy.module_class,
        fingerprint=fingerprint_of(anatomy),
        units=tuple(unit for unit in units if unit.name in {p.unit for p in params.values()} or unit.name == ROOT),
        params=params,
        buffers={name: _buffer(fact) for name, fact in anatomy.buffers.items()},
        buffer_policy=sharding.buffers,
        compute=precision.compute,
        output=precision.output,
        cast_inputs=precision.cast_inputs,
        offload=sharding.offload and engine == "fsdp2",
        pin_memory=sharding.pin_memory,
        sync_every_microbatch=sharding.sync_every_microbatch if engine == "fsdp2" else False,
        ddp=(ddp or DDP()) if engine == "ddp" else None,
        edits=(*make_edits(anatomy, remat=remat, compile=compile, units=units), *parts.edits(), *parts.casts_of(units)),
        notes=tuple(notes),
    )
    check_recipe(recipe)
    return recipe


def fingerprint_of(anatomy: Anatomy) -> str:
    """A digest of the names, shapes, dtypes, ties and trainability of a module: equal digests, same recipe."""
    facts = msgspec.json.encode((anatomy.params, anatomy.buffers), order="deterministic")
    return hashlib.sha256(facts).hexdigest()[:16]


def _engine(parts: Parts, layout: Layout, sharding: Sharding) -> tuple[Engine, str]:
    casts = _casts(parts)
    if sharding.engine == "fsdp2":
        return "fsdp2", 'asked for by Sharding(engine="fsdp2")'
    if sharding.engine == "ddp":
        if layout.dp_shard > 1 or casts:
            raise UnsupportedError(
                'Sharding(engine="ddp") with ' + (f"dp_shard={layout.dp_shard}" if layout.dp_shard > 1 else f"{casts}"),
                why="DDP keeps parameters whole and computes in the dtype they are stored in",
                fix='leave engine at "auto", or use dp_shard=1 and precision=None',
            )
        return "ddp", 'asked for by Sharding(engine="ddp")'
    if layout.dp_shard > 1:
        return "fsdp2", f"dp_shard={layout.dp_shard} cuts parameters"
    if casts:
        return "fsdp2", f"{casts}, which DDP cannot do"
    if sharding.offload:
        return "fsdp2", "parameters are kept in host memory, which DDP cannot do"
    return "ddp", "dp_shard=1 and storage dtype = compute dtype: nothing to gather"


def _casts(parts: Parts) -> str | None:
    """A cast that is asked for, in words; None if everything is computed and reduced in the dtype it is stored in."""
    if parts.base.output:
        return f"an output of {parts.base.output}"
    for name, fact in parts.anatomy.params.items():
        storage, compute, reduce = parts.dtypes(name)
        if compute != storage:
            return f"{name!r} stored in {storage} and computed in {compute}"
        if fact.trainable and reduce != storage:
            return f"{name!r} stored in {storage} and reduced in {reduce}"
    return None


def _check_reshard(layout: Layout, given: bool | int | dict[str, bool | int]) -> None:
    for reshard in given.values() if isinstance(given, dict) else (given,):
        if not isinstance(reshard, bool) and layout.dp_shard % reshard:
            divisors = [n for n in range(2, layout.dp_shard + 1) if layout.dp_shard % n == 0]
            raise PlanError(
                f"reshard_after_forward={reshard} on dp_shard={layout.dp_shard}",
                why="between forward and backward parameters stay cut over groups of that many ranks, so it must divide "
                "dp_shard",
                fix=f"use {' or '.join(map(str, divisors))}, or true" if divisors else "use true or false",
            )


def _without_effect(
    anatomy: Anatomy,
    units: tuple[Unit, ...],
    engine: str,
    layout: Layout,
    precision: Precision,
    sharding: Sharding,
    ddp: DDP,
) -> list[Note]:
    """Options that this recipe has no use for: said, because another layout, or another model, may have."""
    idle: list[tuple[Precision | Sharding | DDP, str, str]] = []  # record, key, why
    if not any("float" in fact.dtype for fact in anatomy.buffers.values()):
        idle.append((sharding, "buffers", "the model has no floating buffers"))
    if precision.compute is None:
        idle.append((precision, "cast_inputs", "without compute no input of the model is cast"))
    if engine == "ddp":
        idle += [(sharding, key, "DDP keeps whole copies") for key in FSDP2_ONLY]
    else:
        idle += [(ddp, key, "the engine is fsdp2") for key in DDP.__struct_fields__]
        if len(units) == 1:
            alone = "the root is the only unit, and it stays gathered"
            idle += [(sharding, key, alone) for key in ("reshard_after_forward", "reshard_every", "prefetch")]
        if sharding.sync_every_microbatch == "reduce_scatter" and layout.dp_replicate == 1:
            idle.append((sharding, "sync_every_microbatch", "dp_replicate=1, so it is the same as true"))
    given = [(record, key, why) for record, key, why in idle if getattr(record, key) != default_of(type(record), key)]
    return [
        Note(
            name=key,
            why=f"{getattr(record, key)!r} has no effect here: {because}",
            option=f"{type(record).__name__.lower()}.{key}",
        )
        for record, key, because in given
    ]


def _lossy(params: dict[str, Param], units: tuple[Unit, ...], precision: Precision) -> list[Note]:
    """What loses digits that torch's own words ask for, and that nothing else would show."""
    notes = []
    halves = {p.reduce for p in params.values() if p.trainable and p.reduce in HALVES}
    asked = {precision.reduce} | {p.reduce for p in params.values() if p.trainable and p.storage not in HALVES}
    for dtype in sorted(halves & asked):
        bits, inf = HALVES[dtype], ", and sums above 65504 are inf" if dtype == "float16" else ""
        why = (
            f"gradients are summed in {dtype}, over the ranks and over micro-batches, which keeps {bits} bits: a summand below "
            f'1/{2 ** (bits + 1)} of the sum is lost{inf}; reduce="fp32" keeps them, at twice the bytes of each reduction'
        )
        notes.append(Note(name="reduce", why=why, option="precision.reduce", warns=True))
    if precision.cast_inputs == "units":
        inner = len(units) > 1
        why = (
            f"units: floating inputs of every unit are cast to {precision.compute}, positions and masks among them; the first "
            "forward warns of those that change by it"
        )
        notes.append(
            Note(
                name="cast_inputs",
                why=why if inner else "units: the root is the only unit, so it is as root",
                option="precision.cast_inputs",
            )
        )
    return notes


def _param(fact: TensorFact, unit: str, engine: str, parts: Parts, notes: list[Note], name: str) -> Param:
    cut = engine == "fsdp2" and fact.numel > 0 and len(fact.shape) > 0
    storage, compute, reduce = parts.dtypes(name)
    if engine == "fsdp2" and not fact.shape:
        why = "0-dim: replicated, since there is nothing to cut"
        if (storage, storage) != (compute, reduce):  # what is not gathered is not cast
            why += f"; computed and reduced in {storage}, as it is stored"
            compute = reduce = storage
        notes.append(Note(name=name, why=why))
    return Param(
        shape=fact.shape,
        dtype=fact.dtype,
        trainable=fact.trainable,
        aliases=fact.aliases,
        unit=unit,
        cuts=(Cut(axis="fsdp", dim=0),) if cut else (),
        storage=storage,
        compute=compute,
        reduce=reduce,
    )


def _buffer(fact: TensorFact) -> Buffer:
    return Buffer(shape=fact.shape, dtype=fact.dtype, persistent=fact.persistent, aliases=fact.aliases)
