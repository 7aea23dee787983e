"""A recipe under construction: the rule of each technique reads it and adds to it."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from shardwise.layout import Layout
from shardwise.recipe.recipe import Engine, Recipe, check_recipe
from shardwise.recipe.records import ROOT, SUMMED_OVER, Anatomy, Buffer, Codec, Cut, Edit, Note, Param, Record, Unit


class Dtypes(NamedTuple):
    """The dtypes of one parameter: stored in, computed with, and its gradient reduced in."""

    storage: str
    compute: str
    reduce: str


class Casting(Protocol):
    """The mixed precision of a module, or a part of it; None: no cast."""

    @property
    def compute(self) -> str | None: ...
    @property
    def reduce(self) -> str | None: ...
    @property
    def cast_inputs(self) -> str: ...


@dataclass(frozen=True)
class NoCast:
    """A :class:`Casting` that casts nothing."""

    compute: str | None = None
    reduce: str | None = None
    cast_inputs: str = "root"


@dataclass
class Draft:
    """The decisions made so far.

    Attributes:
        anatomy: the module's structure; tensors in the dtypes that they are stored in.
        layout: the layout of the ranks.
        dtypes: name of a parameter -> its dtypes.
        casting: the casts of the module, outside of ``casting_in``.
        casting_in: name of a module -> the casts of the innermost part that it is, or is in; None: it is in no such
            part.
        needs_units: why parameters cannot be kept as full copies that are computed with as they are stored, as text;
            the first one counts.
        engine: how data-parallel ranks share the parameters.
        units: modules that are gathered together; the root last.
        homes: name of a parameter -> its unit.
        cuts: name of a parameter -> how it is divided, outermost cut first.
        codecs: name of a parameter that holds bytes -> what they stand for.
        edits: changes to modules; those of techniques that act around the sharding are in ``edits_around``.
        notes: choices, and their reasons.
        buffers: name of a buffer -> its policy, where it is another than that of :class:`~shardwise.recipe.records.Buffer`.
        sum_axes: name of a buffer that a forward writes -> the axis whose ranks each add to it; "": what they add is no part of what one
            process adds. None: every buffer is added to by the ranks of :data:`~shardwise.recipe.records.SUMMED_OVER`.
        entries: name of a technique -> the part of the recipe that belongs to it alone.
        kept: name of a technique -> what its rule keeps for its act; and what a probe keeps for those behind it, on the rank that runs them.
    """

    anatomy: Anatomy
    layout: Layout
    dtypes: dict[str, Dtypes] = field(default_factory=dict)
    casting: Casting = field(default_factory=NoCast)
    casting_in: Callable[[str], Casting | None] = lambda _: None
    needs_units: list[str] = field(default_factory=list)
    engine: Engine = "ddp"
    units: tuple[Unit, ...] = (Unit(name=ROOT, modules=(ROOT,), reshard=False, why="the whole module"),)
    homes: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, list[Cut]] = field(default_factory=dict)
    codecs: dict[str, Codec] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    edits_around: list[Edit] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    buffers: dict[str, str] = field(default_factory=dict)
    sum_axes: dict[str, str] | None = None
    entries: dict[str, Record] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, fact in self.anatomy.params.items():
            self.dtypes.setdefault(name, Dtypes(fact.dtype, fact.dtype, fact.dtype))

    def note(self, name: str, why: str, *, option: str | None = None, warns: bool = False) -> None:
        """Records a choice and its reason; see :class:`~shardwise.recipe.records.Note`."""
        self.notes.append(Note(name=name, why=why, option=option, warns=warns))

    def cut(self, name: str, cut: Cut) -> None:
        """Divides parameter ``name``, or what earlier cuts have left of it, once more."""
        self.cuts.setdefault(name, []).append(cut)

    def recipe(self) -> Recipe:
        """Builds the recipe and checks it.

        Raises:
            PlanError: it contradicts itself.
        """
        anatomy = self.anatomy
        params = {name: self._param(name) for name in anatomy.params}
        used = {param.unit for param in params.values()} | {ROOT}
        recipe = Recipe(
            layout=self.layout.all_degrees,
            engine=self.engine,
            module_class=anatomy.module_class,
            fingerprint=fingerprint_of(anatomy),
            units=tuple(unit for unit in self.units if unit.name in used),
            params=params,
            buffers={
                name: Buffer(
                    shape=fact.shape,
                    dtype=fact.dtype,
                    persistent=fact.persistent,
                    aliases=fact.aliases,
                    policy=self.buffers.get(name, "equal" if fact.persistent else "own"),
                    axis=(self.sum_axes or {}).get(name) or SUMMED_OVER,
                )
                for name, fact in anatomy.buffers.items()
            },
            techniques={name: _as_json(entry) for name, entry in self.entries.items()},
            edits=(*self.edits, *self.edits_around),
            notes=tuple(self.notes),
        )
        check_recipe(recipe)
        return recipe

    def _param(self, name: str) -> Param:
        fact = self.anatomy.params[name]
        storage, compute, reduce = self.dtypes[name]
        return Param(
            shape=fact.shape,
            dtype=fact.dtype,
            trainable=fact.trainable,
            aliases=fact.aliases,
            unit=self.homes.get(name, ROOT),
            cuts=tuple(self.cuts.get(name, ())),
            storage=storage,
            compute=compute,
            reduce=reduce,
            codec=self.codecs.get(name),
        )


def fingerprint_of(anatomy: Anatomy) -> str:
    """A digest of the names, shapes, dtypes, ties and trainability of a module: equal digests, same recipe."""
    facts = msgspec.json.encode((anatomy.params, anatomy.buffers), order="deterministic")
    return hashlib.sha256(facts).hexdigest()[:16]


def _as_json(entry: Record) -> dict[str, Any]:
    return msgspec.to_builtins(entry)
