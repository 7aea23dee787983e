"""What is said, and known, of a model that runs on some rows of its sequences: see :mod:`shardwise.model.positions`."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.model.own_positions import Made
from shardwise.model.products import Products
from shardwise.model.pytrees import keyed_leaves
from shardwise.model.tensors import version_of

Dims = dict[str, int]
"""Path of a tensor in arguments, or in an output -> its dim of positions."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a stream of positions is cut to rows, and what is done for code that needs more than its rows.

    Attributes:
        cut: modules at whose entry what grows with the length is cut.
        owners: of ``cut``, the modules that run others of it and are on rows too: their own code adds to what those return.
        whole: module of ``cut`` -> paths of arguments that stay whole there.
        join: modules whose output is joined to the whole stream again.
        islands: modules that run on the whole stream on every rank.
        positions: modules whose calls that make positions get those of the rows.
        products: module that writes attention out -> its calls that are exceptions, ``(kind, place)``: in it the second factor of products
            is of all positions, but of these; positions that it makes are those of the rows, but of these: they are of all.
        keys: modules within blocks whose output is of all positions, as of the layers that make keys and values.
        square: what has two dims of positions is cut along the first one, that of queries.
        unjudged: modules that may return something else, such as an order of tokens: what is made of it is compared.
        masks_of_rows: masks that transformers makes are those of the rows.
    """

    cut: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    whole: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    join: tuple[str, ...] = ()
    islands: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    products: Mapping[str, tuple[tuple[str, str], ...]] = dataclasses.field(default_factory=dict)
    keys: tuple[str, ...] = ()
    square: bool = False
    unjudged: tuple[str, ...] = ()
    masks_of_rows: bool = True


@dataclasses.dataclass
class Facts:
    """What a run on rows has done, by names of modules, paths of arguments, places of calls in the code and dims: as JSON.

    Attributes:
        cut: module -> for each of its calls, what is cut at its entry, and what is on rows already.
        join: module -> what is joined in its output.
        keys: the same, of modules within blocks.
        islands: module -> what is joined at its entry, and what is cut of its output.
        positions: module -> its calls that make positions.
        attention: module that calls attention -> the places of the calls whose keys are rows.
        products: module that writes attention out -> its products whose second factor is of all positions.
        output: ``rows``, ``whole``, or "" if it has no floating tensor.
        outputs: what of the model's output is on rows.
        masks_of_rows: as of the plan.
        draws: something is dropped out, in training.
        drops: module whose own code drops something -> for each of its calls the dim of positions of what it drops; -1: it has none; -2: it has
            some in one forward, and none in another.
        queries: module that calls attention -> the places of the calls whose queries are rows.
        seen: module of these -> kind -> the places of all its calls, in their order.
        buffers: name of each that a run writes -> whether each rank adds to it what is added on all positions; False: a part of that; None:
            neither.
    """

    cut: dict[str, list[list[Dims]]] = dataclasses.field(default_factory=dict)
    join: dict[str, Dims] = dataclasses.field(default_factory=dict)
    keys: dict[str, Dims] = dataclasses.field(default_factory=dict)
    islands: dict[str, list[Dims]] = dataclasses.field(default_factory=dict)
    positions: dict[str, Made] = dataclasses.field(default_factory=dict)
    attention: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    products: dict[str, Products] = dataclasses.field(default_factory=dict)
    output: str = ""
    outputs: Dims = dataclasses.field(default_factory=dict)
    masks_of_rows: bool = True
    draws: bool = dataclasses.field(default=False, compare=False)
    drops: dict[str, list[int]] = dataclasses.field(default_factory=dict, compare=False)
    queries: dict[str, list[str]] = dataclasses.field(default_factory=dict, compare=False)
    seen: dict[str, dict[str, list[str]]] = dataclasses.field(default_factory=dict, compare=False)
    buffers: dict[str, bool | None] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def has_cuts(self) -> bool:
        return any(call[0] for calls in self.cut.values() for call in calls)

    def add(self, other: "Facts") -> None:
        """Adds what another rank, or mode, has done besides."""
        self.draws |= other.draws
        self.add_drops(other)
        self.add_buffers(other.buffers)
        for name, places in other.queries.items():
            self.queries[name] = sorted({*self.queries.get(name, ()), *places})
        self.add_seen(other)

    def add_seen(self, other: "Facts") -> None:
        for name, kinds in other.seen.items():
            for kind, places in kinds.items():
                for place in places:
                    self.note_seen(name, kind, place)

    def note_seen(self, name: str, kind: str, place: str) -> None:
        """Notes a call of a module's own code."""
        places = self.seen.setdefault(name, {}).setdefault(kind, [])
        if place not in places:
            places.append(place)

    def add_buffers(self, found: Mapping[str, bool | None]) -> None:
        """Adds what other runs have added to buffers."""
        for name, is_all in found.items():
            self.buffers[name] = is_all if self.buffers.get(name, is_all) is is_all else None

    def add_drops(self, other: "Facts") -> None:
        for name, dims in other.drops.items():
            for number, dim in enumerate(dims):
                self.note_drop(name, number, dim)

    def note_drop(self, name: str, number: int, dim: int) -> None:
        """Notes of which dim of positions a call drops."""
        dims = self.drops.setdefault(name, [])
        if number == len(dims):
            dims.append(dim)
        elif dims[number] != dim:
            dims[number] = -2


class Differs(Exception):  # noqa: N818 - it is not raised to users
    """A module does on rows what it does not on all.

    Attributes:
        name: of the module.
        why: what differs.
        is_mask: a mask has not the keys of all positions.
        is_of_heads: heads cannot be divided.
        is_kept: it keeps a tensor of its rows.
        is_of_gradients: a backward of the user's own would get parts of gradients.
        is_drawn: random numbers are drawn for positions, by the module's own code.
    """

    def __init__(
        self,
        name: str,
        why: str,
        *,
        is_mask: bool = False,
        is_of_heads: bool = False,
        is_kept: bool = False,
        is_of_gradients: bool = False,
        is_drawn: bool = False,
    ):
        super().__init__(f"{name}: {why}")
        self.is_of_gradients, self.is_drawn = is_of_gradients, is_drawn
        self.name, self.why = name, why
        self.is_mask, self.is_of_heads, self.is_kept = is_mask, is_of_heads, is_kept


class AroundBlocks(Differs):
    """The code around the blocks adds to what they return, and is not of each position."""


class Whole:
    """What the run on all positions had; of the modules ``only``, if there are many blocks, and of products in ``products_of``.

    Attributes:
        inputs, outputs: module and the number of its call -> its arguments, and what it returned.
        versions: how often each tensor of an output had been changed in place by then: what the model's code changes later is not judged.
        attention: and the place of a call of attention in it -> queries, keys, values and result; of some modules keys and values alone,
            unless heads are divided.
        products: and the place of a product in its own code -> its second factor.
        made: module -> its calls that make positions, ``(kind, place)``.
        functions: the names of the functions that were called, in order.
        hides: modules whose code computes with values apart from their gradients.
        writes: modules that write what they are called with.
        rewritten: modules, and the numbers of their calls, whose output is written later.
        has_own_backwards: code of the model has backwards that are not torch's, or looks at those: functions, operators, hooks.
        ends, kept: tensors that the model returned, and kept.
    """

    def is_like(self, other: "Whole") -> bool:
        """Whether the same functions were called in both, with the same results."""
        return (
            self.functions == other.functions
            and len(self.ends) == len(other.ends)
            and all(
                x.shape == y.shape and not x.is_meta and torch.equal(x, y)
                for x, y in zip(self.ends, other.ends, strict=True)
            )
        )

    def __init__(self, only: frozenset[str] | None = None, products_of: frozenset[str] = frozenset()) -> None:
        self._only, self.products_of = only, products_of
        self.inputs: dict[tuple[str, int], Any] = {}
        self.outputs: dict[tuple[str, int], Any] = {}
        self.versions: dict[tuple[str, int], dict[str, int]] = {}
        self.attention: dict[tuple[str, int, str], tuple[Tensor, Tensor, Tensor, Tensor | None]] = {}
        self.products: dict[tuple[str, int, str], Any] = {}
        self.looked_up: dict[tuple[str, int, int], list[Tensor]] = {}  # indices of embeddings, where they count
        self.made: dict[str, dict[tuple[str, str], None]] = {}
        self.functions: list[str] = []
        self.has_own_backwards = False
        self.hides: set[str] = set()
        self.writes: set[str] = set()
        self.rewritten: set[tuple[str, int]] = set()
        self.ends: list[Tensor] = []
        self.kept: list[tuple[str, Tensor]] = []
        self.drops: dict[tuple[str, int, int], Any] = {}  # shapes of what was dropped, by the calls of a forward
        self.drawn: dict[tuple[str, int, int], Any] = {}  # the same of random numbers that code draws itself
        self.layer_inputs: dict[tuple[str, int], tuple[Any, Tensor | None]] = {}  # shape, and values if they are kept
        self.buffers: dict[str, Tensor] = {}  # that were written
        self.on_rows: list[dict[str, Tensor]] = []  # the same of each rank, where they are other values

    def note_rewritten(self) -> None:
        for key, versions in self.versions.items():
            of_now = dict(keyed_leaves(self.outputs[key]))
            if any(version_of(of_now[path]) != version for path, version in versions.items()):
                self.rewritten.add(key)

    def of_backwards(self) -> dict[str, Any]:
        """What the run of its backward is to know."""
        return {"writes": self.writes, "rewritten": self.rewritten, "copies_all": self.has_own_backwards}

    def forget_ranks(self) -> None:
        """Ranks run from the first one on."""
        self.on_rows.clear()

    def added(self, begin: Mapping[str, Tensor]) -> dict[str, bool | None]:
        """What ranks have added to buffers, whose values were ``begin`` before: see :attr:`Facts.buffers`."""
        found: dict[str, bool | None] = {}
        for name in dict.fromkeys([*self.buffers, *itertools.chain(*self.on_rows)]):
            parts, all_ = [of_rank[name] for of_rank in self.on_rows if name in of_rank], self.buffers.get(name)
            found[name] = None if parts else True
            values = [x for x in (begin.get(name), all_, *parts) if x is not None]
            if parts and len(values) == len(parts) + 2 and len({x.shape for x in values}) == 1:
                before, of_all, *of_parts = map(_wide, values)
                num_whole = len(self.on_rows) - len(parts)
                off = sum(x - before for x in of_parts) - (1 - num_whole) * (of_all - before)
                if bool((off.abs() <= 1e-9 * (of_all - before).abs().max()).all()):
                    found[name] = False
        return found

    def without_modules(self) -> "Whole":
        """What :meth:`is_like` compares."""
        other = Whole(self._only)
        other.functions, other.ends = self.functions, [x.detach() for x in self.ends]
        return other

    @property
    def is_of_some(self) -> bool:
        return self._only is not None

    def keeps(self, name: str) -> bool:
        return self._only is None or name in self._only


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)
