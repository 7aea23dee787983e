"""The recipe: which bytes of which tensor each rank holds under a layout, as one frozen record.

Everything that needs to know which rank holds what asks the recipe, through
:func:`~shardwise.recipe.cuts.extents` and :func:`~shardwise.recipe.cuts.owners`, never the run-time tensors.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from shardwise.errors import PlanError
from shardwise.layout import GIVEN_AXES, Coord, Layout
from shardwise.recipe.check import check_param
from shardwise.recipe.cuts import Slice, extents, local_shape, owners
from shardwise.recipe.records import (
    DTYPE_BYTES,
    POLICIES,
    ROOT,
    STATISTICS,
    SUM_AXES,
    Buffer,
    Edit,
    Note,
    Param,
    Record,
    Unit,
)

RECIPE_VERSION = 2
Engine = Literal["ddp", "fsdp2"]
E = TypeVar("E", bound=Record)
# In data of "data" of older recipes: the policy of running statistics, which each buffer has now.
_BUFFER_WORD = "buffers"
_OF_VERSION_1 = {  # field of version 1 -> technique and key in the current version
    "compute": ("precision", "compute"),
    "output": ("precision", "output"),
    "cast_inputs": ("precision", "cast_inputs"),
    "buffer_policy": ("data", _BUFFER_WORD),
    "offload": ("data", "offload"),
    "pin_memory": ("data", "pin_memory"),
    "sync_every_microbatch": ("data", "sync_every_microbatch"),
    "ddp": ("data", "ddp"),
}


class Recipe(Record, frozen=True):
    """How a module is sharded: which bytes of which tensor each rank holds. The same on every rank; see :meth:`at`.

    Example:
        >>> recipe = Recipe.from_json(text)  # doctest: +SKIP
        >>> recipe.at(0).extents("blocks.0.attn.q.weight")  # doctest: +SKIP
        (Slice(starts=(0, 0), sizes=(64, 128), local_starts=(0, 0)),)
    """

    layout: dict[str, int]
    engine: Engine
    module_class: str
    fingerprint: str
    units: tuple[Unit, ...]
    params: dict[str, Param]
    buffers: dict[str, Buffer]
    # Name of a technique -> the data that belongs to it alone; see :meth:`entry`.
    techniques: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    edits: tuple[Edit, ...] = ()  # changes to modules, in the order in which they are made
    notes: tuple[Note, ...] = ()
    version: int = RECIPE_VERSION

    def to_json(self) -> str:
        """The recipe as JSON. Stable: parameters in the order of the module, the same text on every rank."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Recipe:
        """Reads and checks the recipe in ``text``.

        Raises:
            PlanError: not a recipe of this version, or one that contradicts itself.
        """
        try:
            recipe = msgspec.convert(_upgraded(msgspec.json.decode(text)), cls)
        except msgspec.MsgspecError as error:
            _refuse_version(_version_of(text))  # fields of another version are unknown here: report that first
            raise PlanError("a recipe in JSON", why=str(error), fix="use the text that Recipe.to_json wrote") from error
        check_recipe(recipe)
        return recipe

    def entry(self, technique: str, cls: type[E]) -> E:
        """The recipe's data of one technique, as a record of ``cls``; the record's defaults where there is none."""
        return msgspec.convert(self.techniques.get(technique, {}), cls)

    def edits_of(self, technique: str) -> tuple[Edit, ...]:
        """The changes to modules that one technique makes."""
        return tuple(edit for edit in self.edits if edit.technique == technique)

    @property
    def is_cut(self) -> bool:
        """Whether a rank computes with gathered copies of parameters, unit by unit, and not with the tensors that it holds."""
        return self.engine == "fsdp2"

    @property
    def grid(self) -> Layout:
        """The layout as a :class:`Layout`."""
        return Layout(**self.layout)

    def at(self, rank: int) -> RankView:
        """What ``rank`` holds, as a :class:`RankView`."""
        return RankView(self, self.grid.coord(rank))


class RankView:
    """One rank's view of a recipe."""

    def __init__(self, recipe: Recipe, coord: Coord):
        self.recipe, self.coord = recipe, coord
        # Called for every tensor of every load, save and norm; looking up a cut and a layout takes longer than these.
        self._extents: dict[str, tuple[Slice, ...]] = {}
        self._owners: dict[str, tuple[tuple[int, ...], ...]] = {}

    def extents(self, name: str) -> tuple[Slice, ...]:
        """Pieces of parameter ``name`` that this rank holds (see :func:`shardwise.recipe.cuts.extents`)."""
        if name not in self._extents:
            self._extents[name] = extents(self.recipe.params[name], self.coord)
        return self._extents[name]

    def owners(self, name: str) -> tuple[tuple[int, ...], ...]:
        """For each piece that this rank holds, the ranks that hold the same one."""
        if name not in self._owners:
            self._owners[name] = owners(self.recipe.params[name], self.coord)
        return self._owners[name]

    def num_bytes(self) -> int:
        """Bytes of parameter storage on this rank, at rest (nothing gathered)."""
        total = 0
        for param in self.recipe.params.values():
            numel = 1
            for size in local_shape(param, self.coord):
                numel *= size
            total += numel * DTYPE_BYTES[param.storage]
        return total


def check_recipe(recipe: Recipe) -> None:
    """Raises PlanError if ``recipe`` cannot be carried out; the messages below are the rules."""
    _refuse_version(recipe.version)
    _check_layout(recipe.layout)
    layout = recipe.grid
    units = [unit.name for unit in recipe.units]
    if ROOT not in units or len(set(units)) < len(units):
        raise PlanError(
            f"units {units}",
            why="names of units differ, and one of them is the root's, ''",
            fix="keep one unit of each name, and the root",
        )
    for name, param in recipe.params.items():
        _check_dtypes(name, param)
        if param.unit not in units:
            raise PlanError(
                f"unit {param.unit!r}",
                why=f"the recipe has the units {sorted(units)}",
                fix="name one of them, or add the unit",
                name=name,
            )
        check_param(name, param, layout)
        _check_codec(name, param)
    for name, buffer in recipe.buffers.items():
        _check_buffer(name, buffer)
    aliases = [alias for param in recipe.params.values() for alias in param.aliases]
    twice = sorted({alias for alias in aliases if alias in recipe.params or aliases.count(alias) > 1})
    if twice:
        raise PlanError(
            f"{twice} given as two tensors",
            why="a tensor is stored once, under its first name",
            fix="keep it as an alias of one parameter",
            name=twice[0],
        )


def _upgraded(told: Any) -> Any:
    """A recipe of version 1, or one whose buffers have no policies, converted to the current version; any other unchanged."""
    if not isinstance(told, dict):
        return told
    if told.get("version", 1) == 1:
        techniques: dict[str, dict[str, Any]] = {}
        for field, (technique, key) in _OF_VERSION_1.items():
            if field in told:
                techniques.setdefault(technique, {})[key] = told[field]
        rest = {key: value for key, value in told.items() if key not in _OF_VERSION_1}
        told = rest | {"techniques": techniques, "version": RECIPE_VERSION}
    data = told.get("techniques", {}).get("data", {})
    if _BUFFER_WORD in data:
        word = data.pop(_BUFFER_WORD)
        for name, buffer in told.get("buffers", {}).items():
            is_statistic = name.rpartition(".")[2] in STATISTICS
            buffer["policy"] = word if is_statistic else "equal" if buffer.get("persistent") else "own"
    return told


def _version_of(text: str | bytes) -> int:
    try:
        return msgspec.convert(msgspec.json.decode(text), dict).get("version", RECIPE_VERSION)
    except msgspec.MsgspecError:
        return RECIPE_VERSION


def _refuse_version(version: int) -> None:
    if version != RECIPE_VERSION:
        raise PlanError(
            f"a recipe of version {version}",
            why=f"this Shardwise reads version {RECIPE_VERSION}",
            fix="make the recipe again with this version",
        )


def _check_layout(degrees: dict[str, int]) -> None:
    wrong = [axis for axis in degrees if axis not in GIVEN_AXES] + [a for a in GIVEN_AXES if degrees.get(a, 1) < 1]
    if wrong:
        raise PlanError(
            f"layout {degrees}",
            why=f"{wrong[0]!r} is not an axis with a degree of 1 or more",
            fix=f"use the axes {', '.join(GIVEN_AXES)}",
        )


def _check_buffer(name: str, buffer: Buffer) -> None:
    for field, value, known in (("policy", buffer.policy, POLICIES), ("axis", buffer.axis, SUM_AXES)):
        if value not in known:
            raise PlanError(
                f"a buffer of the {field} {value!r}",
                why=f"the end of a window knows the {field} {' or '.join(map(repr, known))} alone",
                fix=f"use {known[-1]!r}",
                name=name,
            )


def _check_codec(name: str, param: Param) -> None:
    if param.codec is not None and (param.trainable or {param.storage, param.compute} != {"uint8"}):
        raise PlanError(
            f"{param.codec.kind} bytes of {param.codec.of} in a parameter of {param.storage}, computed in {param.compute}"
            + (", which is trained" if param.trainable else ""),
            why="they are codes and no numbers: a cast would change them, and no gradient exists of them",
            fix="store them as uint8, do not cast them, and freeze the parameter",
            name=name,
        )


def _check_dtypes(name: str, param: Param) -> None:
    unknown = [dtype for dtype in (param.dtype, param.storage, param.compute, param.reduce) if dtype not in DTYPE_BYTES]
    if unknown:
        raise PlanError(
            f"dtype {unknown[0]!r}",
            why="its size in bytes is not known",
            fix=f"use one of {', '.join(DTYPE_BYTES)}",
            name=name,
        )
