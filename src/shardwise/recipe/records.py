"""The records a recipe is made of: frozen, torch-free, JSON round-trip.

:class:`Anatomy` says what a module *is* (read by :mod:`shardwise.anatomy`); :class:`Recipe` says where every byte goes.
Everything that needs to know which rank holds what asks the recipe through
:func:`shardwise.recipe.cuts.extents` and :func:`~shardwise.recipe.cuts.owners`, never the run-time tensors.
Shapes are in elements, sizes in elements along one tensor dim, dtypes are torch's names without the ``torch.`` prefix.
"""

from __future__ import annotations

import msgspec

from shardwise.errors import PlanError
from shardwise.layout import Coord, Layout

__all__ = [
    "DTYPE_BYTES",
    "Anatomy",
    "BlockList",
    "Buffer",
    "Cut",
    "Note",
    "Param",
    "Part",
    "RankView",
    "Recipe",
    "TensorFact",
    "Unit",
]

RECIPE_VERSION = 1
ROOT = ""  # name of the root module, and of the unit that holds what no other unit holds

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: compared by value, unknown JSON fields refused."""


class TensorFact(_Record):
    """One parameter or buffer of the unsharded module, under its canonical name."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False
    persistent: bool = True  # buffers only: in the state dict or not
    aliases: tuple[str, ...] = ()  # the other names of the same tensor

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


class BlockList(_Record):
    """Modules that stand in a list, and whether every rank is sure to enter each of them in every forward."""

    name: str
    blocks: tuple[str, ...]
    always_entered: bool
    why: str


class Anatomy(_Record):
    """What was read in a module: tensors, ties, outermost block lists, class names."""

    module_class: str
    params: dict[str, TensorFact]
    buffers: dict[str, TensorFact]
    lists: tuple[BlockList, ...]
    classes: dict[str, str]  # module name -> class name


class Part(_Record):
    """A slice of a dim, ``size`` long, cut evenly over an axis; or, with ``replicas`` = r, cut over every r-th rank and
    held whole by r neighbours (key/value heads fewer than ranks)."""

    size: int
    replicas: int = 1


class Cut(_Record):
    """A dim divided over an axis. No ``parts``: the whole (local) dim is one part.

    Even means as ``torch.chunk`` does it: pieces of ``ceil(size / degree)``, the last ones shorter or empty.
    """

    axis: str
    dim: int
    parts: tuple[Part, ...] = ()


class Param(_Record):
    """One parameter: what it is, which unit gathers it, how it is cut, in which dtypes it is stored, used, reduced."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]
    unit: str
    cuts: tuple[Cut, ...]
    storage: str
    compute: str
    reduce: str


class Buffer(_Record):
    """One buffer: replicated on every rank, kept in its own dtype."""

    shape: tuple[int, ...]
    dtype: str
    persistent: bool
    aliases: tuple[str, ...] = ()


class Unit(_Record):
    """Modules gathered together; ``reshard`` as FSDP2's ``reshard_after_forward`` takes it."""

    name: str
    modules: tuple[str, ...]
    reshard: bool | int
    why: str


class Note(_Record):
    """A choice made for the user, and its reason."""

    name: str
    why: str


class Recipe(_Record):
    """Where every byte of a module is under a layout. Global: the same on every rank; :meth:`at` is a rank's view.

    Example:
        >>> recipe = Recipe.from_json(text)  # doctest: +SKIP
        >>> recipe.at(0).extents("blocks.0.attn.q.weight")  # doctest: +SKIP
        (Slice(starts=(0, 0), sizes=(64, 128), local_starts=(0, 0)),)
    """

    layout: dict[str, int]
    engine: str  # "ddp" | "fsdp2"
    module_class: str
    fingerprint: str
    units: tuple[Unit, ...]
    params: dict[str, Param]
    buffers: dict[str, Buffer]
    buffer_policy: str = "rank0"
    output: str | None = None  # dtype of floating outputs; None = as computed
    cast_inputs: str = "root"
    notes: tuple[Note, ...] = ()
    version: int = RECIPE_VERSION

    def to_json(self) -> str:
        """The recipe as JSON, stable: equal recipes give equal text."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Recipe:
        """The recipe in ``text``, checked.

        Raises:
            PlanError: not a recipe of this version, or one that contradicts itself.
        """
        from shardwise.recipe.check import check_recipe

        try:
            recipe = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise PlanError("a recipe in JSON", why=str(error), fix="use the text that Recipe.to_json wrote") from error
        check_recipe(recipe)
        return recipe

    @property
    def grid(self) -> Layout:
        """The layout as an object."""
        return Layout(**self.layout)

    def at(self, rank: int) -> RankView:
        """What ``rank`` holds."""
        return RankView(self, self.grid.coord(rank))


class RankView:
    """One rank's view of a recipe."""

    def __init__(self, recipe: Recipe, coord: Coord):
        self.recipe, self.coord = recipe, coord

    def extents(self, name: str):
        """Pieces of parameter ``name`` this rank holds (see :func:`shardwise.recipe.cuts.extents`)."""
        from shardwise.recipe.cuts import extents

        return extents(self.recipe.params[name], self.coord)

    def owners(self, name: str) -> tuple[tuple[int, ...], ...]:
        """For each piece this rank holds, the ranks that hold the same one."""
        from shardwise.recipe.cuts import owners

        return owners(self.recipe.params[name], self.coord)

    def num_bytes(self) -> int:
        """Bytes of parameter storage on this rank, at rest."""
        from shardwise.recipe.cuts import local_shape

        total = 0
        for param in self.recipe.params.values():
            numel = 1
            for size in local_shape(param, self.coord):
                numel *= size
            total += numel * DTYPE_BYTES[param.storage]
        return total
