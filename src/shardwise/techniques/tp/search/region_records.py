"""What a search for layers that can be cut over ranks has found: regions, tables, and how each dim is cut."""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.model.layers import Further, Layer
from shardwise.model.run import Place
from shardwise.recipe.records import Part

Rows = tuple[Part, ...]
"""How a dim is cut: see :class:`~shardwise.recipe.records.Cut`."""


@dataclass(frozen=True)
class Whole:
    """A tensor that every rank has whole while it computes a part: its gradients on the ranks are parts of a sum."""


Setting = tuple[str, str]
"""A module and one of its attributes; ``config.KEY`` for one of its own copy of a configuration."""

Cut = tuple[int, Rows] | Whole
"""The dim along which a tensor is cut, and how; or that it is whole."""


@dataclass(frozen=True)
class Region:
    """Layers that are cut together.

    Attributes:
        module: the innermost module that all of them are in.
        columns: weight of a column-parallel layer -> how its outputs are cut.
        rows: weights of the row-parallel layers; their inputs are cut evenly.
        whole: weights of layers whose outputs every rank needs whole for its part, so that gradients on the ranks are
            parts of a sum from there on (a single key/value head). A row-parallel layer may be one of them.
        inner: those of ``columns`` and ``whole`` whose inputs come from what has such gradients (layers of ``whole``,
            arguments, whole tensors), so that theirs are such too.
        tensors: parameter or buffer between the layers -> how it is cut.
        arguments: floating argument of ``module`` -> how it is cut.
        settings: values on a rank, of numbers of heads and the like.
        narrowed: arguments of ``module`` that are read by layers only, and whose width the code uses for that of a
            rank's part: everything but those layers is given as much of them as a rank has outputs.
        readers: layers that read such an argument and are not cut.
        dropouts: layers after whose call dropout is applied to a rank's part, until the next layer is called. Elsewhere
            it is applied to what every rank has whole.
    """

    module: str
    columns: dict[str, Rows]
    rows: tuple[str, ...]
    whole: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    tensors: dict[str, Cut] = field(default_factory=dict)
    arguments: dict[Place, Cut] = field(default_factory=dict)
    settings: dict[Setting, int] = field(default_factory=dict)
    narrowed: tuple[Place, ...] = ()
    readers: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()

    @property
    def sources(self) -> set[str]:
        """The layers whose outputs it starts from."""
        return {*self.columns, *self.whole}

    @property
    def gets_whole(self) -> set[str]:
        """The layers that get all of arguments that are narrowed."""
        return {*self.sources, *self.readers} if self.narrowed else set()

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys((*self.columns, *self.whole, *self.rows)))


@dataclass(frozen=True)
class Table:
    """A weight with a row for each token, which is cut by tokens.

    Attributes:
        weight: its name.
        dim: along which the tokens lie.
        bias: of the layers in ``heads``, cut likewise; None: they have none.
        embeddings: module that looks rows up -> the token whose row gets no gradient there; None: there is none.
        heads: modules that make a number for each token: logits.
        further: parameters of these: those with a dim of outputs are cut likewise, the others are whole.
    """

    weight: str
    dim: int
    bias: str | None
    embeddings: dict[str, int | None]
    heads: tuple[str, ...]
    further: tuple[Further, ...] = ()


@dataclass
class Found:
    """What a search has found.

    Attributes:
        regions: that can be cut, as far as gradients tell.
        left: weight of a layer that stays as it is -> why.
        layers: all layers, by the name of their weight.
        callers: weight of a layer -> the modules in whose forward it is called.
        shares_input: layers that regions start from, of which the next one called gets the same input.
        shown: layers whose outputs reach the output of the model other than through a layer.
        foreign: parameters with two dims or more that functions use which are no layers.
        tables: that are cut by the tokens that their rows are of.
        computed: weight that is computed, and no parameter -> the parameters from which it is.
    """

    regions: list[Region]
    left: dict[str, str]
    layers: dict[str, Layer] = field(default_factory=dict)
    callers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shares_input: set[str] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    tables: list[Table] = field(default_factory=list)
    computed: dict[str, tuple[str, ...]] = field(default_factory=dict)


# ---- indices of a dim ------------------------------------------------------------------------------------------------


def rows_of(cut: Rows, degree: int, rank: int) -> Tensor:
    """The indices of a dim that ``rank`` of ``degree`` holds, ascending."""
    found, offset = [], 0
    for part in cut:
        size = part.size * part.replicas // degree
        start = offset + rank // part.replicas * size
        found.append(torch.arange(start, start + size))
        offset += part.size
    return torch.cat(found)


def parts_of(needed: list[Tensor]) -> Rows | str:
    """How a dim is cut, from the indices that each rank needs, as masks; or why that is no cut that a recipe can hold."""
    degree, masks = len(needed), torch.stack(needed)
    if unused := int((~masks.any(0)).sum()):
        return f"{unused} of {masks.shape[1]} outputs are used by no rank"
    # Neighbouring indices that the same ranks need.
    edges = [0, *(torch.nonzero((masks[:, 1:] != masks[:, :-1]).any(0)).flatten() + 1).tolist(), masks.shape[1]]
    runs = [(b - a, tuple(torch.nonzero(masks[:, a]).flatten().tolist())) for a, b in itertools.pairwise(edges)]
    parts, at = list[Part](), 0
    while at < len(runs):
        size, ranks = runs[at]
        replicas = len(ranks)
        group = runs[at : at + degree // replicas]
        wanted = [(size, tuple(range(rank, rank + replicas))) for rank in range(0, degree, replicas)]
        if degree % replicas or group != wanted:
            shown = "; ".join(f"{size} by {','.join(map(str, ranks))}" for size, ranks in runs[:4])
            return f"ranks need its outputs in an order that is no even cut: {shown}"
        parts.append(Part(size=size * len(group), replicas=replicas))
        at += len(group)
    return tuple(parts)


def part_of(x: Tensor, degree: int, rank: int) -> Tensor:
    """The part of the last dim of a row-parallel layer's input that ``rank`` has."""
    size = x.shape[-1] // degree
    return x[..., rank * size : (rank + 1) * size]
