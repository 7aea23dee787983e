"""What is said, and known, of a model that runs on some rows of its sequences: see :mod:`shardwise.model.positions`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.model.own_positions import Made

Dims = dict[str, int]
"""Path of a tensor in arguments, or in an output -> its dim of positions."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a stream of positions is cut to rows, and what is done for code that needs more than its rows.

    Attributes:
        cut: modules at whose entry what grows with the length is cut.
        whole: module of ``cut`` -> paths of arguments that stay whole there.
        join: modules whose output is joined to the whole stream again.
        islands: modules that run on the whole stream on every rank.
        positions: modules whose calls that make positions get those of the rows.
        unjudged: modules that may return something else, such as an order of tokens: what is made of it is compared.
        masks_of_rows: masks that transformers makes are those of the rows.
    """

    cut: tuple[str, ...] = ()
    whole: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    join: tuple[str, ...] = ()
    islands: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    masks_of_rows: bool = True


@dataclasses.dataclass
class Facts:
    """What a run on rows has done, by names of modules, paths of arguments, numbers of calls and dims: as JSON.

    Attributes:
        cut: module -> for each of its calls, what is cut at its entry, and what is on rows already.
        join: module -> what is joined in its output.
        islands: module -> what is joined at its entry, and what is cut of its output.
        positions: module -> its calls that make positions.
        attention: module that calls attention -> the numbers of the calls whose keys are rows.
        output: ``rows``, ``whole``, or "" if it has no floating tensor.
        outputs: what of the model's output is on rows.
        masks_of_rows: as of the plan.
        draws: something is dropped out, in training.
    """

    cut: dict[str, list[list[Dims]]] = dataclasses.field(default_factory=dict)
    join: dict[str, Dims] = dataclasses.field(default_factory=dict)
    islands: dict[str, list[Dims]] = dataclasses.field(default_factory=dict)
    positions: dict[str, Made] = dataclasses.field(default_factory=dict)
    attention: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    output: str = ""
    outputs: Dims = dataclasses.field(default_factory=dict)
    masks_of_rows: bool = True
    draws: bool = dataclasses.field(default=False, compare=False)

    def add(self, other: "Facts") -> None:
        """Adds what another rank, or mode, has done besides."""
        self.draws |= other.draws


class Differs(Exception):  # noqa: N818 - it is not raised to users
    """A module does on rows what it does not on all.

    Attributes:
        name: of the module.
        why: what differs.
        is_mask: a mask has not the keys of all positions.
        is_of_heads: heads cannot be divided.
        is_kept: it keeps a tensor of its rows.
        is_of_gradients: a backward of the user's own would get parts of gradients.
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
    ):
        super().__init__(f"{name}: {why}")
        self.is_of_gradients = is_of_gradients
        self.name, self.why = name, why
        self.is_mask, self.is_of_heads, self.is_kept = is_mask, is_of_heads, is_kept


class Whole:
    """What the run on all positions had; of the modules ``only``, if there are many blocks."""

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

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self._only = only
        self.inputs: dict[tuple[str, int], Any] = {}
        self.outputs: dict[tuple[str, int], Any] = {}
        self.attention: dict[tuple[str, int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self.gradients: dict[
            tuple[str, int, int], list[Tensor]
        ] = {}  # what hooks, and backwards that do not run, are given
        self.functions: list[str] = []
        self.ends: list[Tensor] = []
        self.kept: list[tuple[str, Tensor]] = []
        self.layer_inputs: dict[tuple[str, int], tuple[Any, Tensor | None]] = {}  # shape, and values if they are kept
        self.buffers: dict[str, Tensor] = {}  # that were written

    def keeps(self, name: str) -> bool:
        """Whether what a module has is kept."""
        return self._only is None or name in self._only
