"""What a test needs of a model: how to build it, its batches, its loss."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.calling import call
from shardwise.step.loss import next_token_loss

__all__ = ["Model", "numbered"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of the tests.

    Attributes:
        name: what tests and tables call it; no two models have the same.
        build: makes it, a top-level function or class, so that ranks can import it.
        batch: (generator, index) -> micro-batch number ``index``, each with another number of tokens; None: it is only built.
        loss, count, forward: as ``TrainStep`` takes them.
        tags: where it comes from ("own", "transformers", "package", "handwritten", "constructor"), and what it is used for: "matrix", the
            matrix of parity; "foreign", the page of models of other packages.
        hard: what makes it hard to shard.
        kind: what it is for, in a word or two.
        model: the name of its class.
        package: the installed package it is imported from; "" = none.
        units: as ``Sharding`` takes it, where blocks are not found, or have names of their own.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], dict[str, Tensor]] | None = None
    loss: Any = next_token_loss
    count: Any = None
    forward: Any = call
    tags: tuple[str, ...] = ()
    hard: str = ""
    kind: str = ""
    model: str = ""
    package: str = ""
    units: Any = "auto"

    def windows(self, num_steps: int, num_micro: int, seed: int = 0) -> list[list[dict[str, Tensor]]]:
        """``num_steps`` windows of ``num_micro`` micro-batches, for all ranks together."""
        assert self.batch is not None, f"{self.name} is only built"
        generator = torch.Generator().manual_seed(seed)
        return [[self.batch(generator, i) for i in range(num_micro)] for _ in range(num_steps)]


def numbered(make: Callable[[int], dict[str, Tensor]]) -> Callable[[torch.Generator, int], dict[str, Tensor]]:
    """``Model.batch`` of a function that makes micro-batches by their number alone."""
    return functools.partial(_numbered, make)


def _numbered(make: Callable[[int], dict[str, Tensor]], generator: torch.Generator, index: int) -> dict[str, Tensor]:
    return make(index)
