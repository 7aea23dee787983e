"""What one run of a model's code has seen."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

Place = tuple[int | str, ...]
"""Where an argument of a module is: its position or name, and the way into containers."""


class Call(NamedTuple):
    """The ``number``-th call of a layer in one run."""

    weight: str
    number: int


class Run:
    """What one run of a :class:`Trial` has seen.

    Attributes:
        inputs: call -> what the layer was called with.
        versions: call -> how often that had been changed in place then.
        leaves: call -> the random output, a leaf.
        arguments: position -> the leaves that took the place of a floating argument of the module asked for, one for
            each call of it.
        output: tensors and numbers of the model's output; none if the run was ended before.
        kept: tensors and numbers that are kept in attributes, or outside of modules, by name: such as a loss of their own.
        keeps: whether anything is kept.
        dropped: what dropout would have been applied to, and random numbers that were drawn, each with the last call before
            it; None: there was none.
        functions: the names of the functions that were called, in order.
    """

    def __init__(self) -> None:
        self.inputs: dict[Call, Tensor] = {}
        self.versions: dict[Call, int] = {}
        self.leaves: dict[Call, Tensor] = {}
        self.arguments: dict[Place, list[Tensor]] = {}
        self.output: list[Tensor] = []
        self.kept: list[tuple[str, Tensor]] = []
        self.keeps = False
        self.dropped: list[tuple[Call | None, Tensor]] = []
        self.functions: list[str] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what layers were called with and have returned, about half of what the graph holds."""
        return sum(x.nbytes for x in (*self.inputs.values(), *self.leaves.values()))

    def until(self, calls: Collection[Call]) -> "Run | None":
        """What the same run has seen that ends when all of these calls have been made; None where only such a run shows it."""
        missing, part = set(calls), Run()
        for call, x in self.inputs.items():
            if not missing:
                break
            if x._version != self.versions[call]:
                return None  # what follows may have changed it
            part.inputs[call], part.versions[call] = x, self.versions[call]
            if call in self.leaves:
                part.leaves[call] = self.leaves[call]
            missing.discard(call)
        if missing or not calls or any(len(leaves) > 1 for leaves in self.arguments.values()):
            return None
        part.arguments = self.arguments
        return part

    def is_like(self, other: "Run") -> bool:
        """Whether the same functions were called in both, on the same numbers."""
        return (
            self.functions == other.functions
            and self.inputs.keys() == other.inputs.keys()
            and all(_are_equal(x, other.inputs[call]) for call, x in self.inputs.items())
            and len(self.output) == len(other.output)
            and all(_are_equal(x, y) for x, y in zip(self.output, other.output, strict=True))
            and [name for name, _ in self.kept] == [name for name, _ in other.kept]
            and all(_are_equal(x, y) for (_, x), (_, y) in zip(self.kept, other.kept, strict=True))
        )


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.is_meta == y.is_meta and (x.is_meta or torch.equal(x, y))
