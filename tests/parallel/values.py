"""Initial values: put together from the pieces of ranks, compared to the bit, and held to the distribution of their constructor."""

import functools
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from layouts import LAYOUTS
from models import Model
from torch import Tensor, nn

from shardwise import Sharding
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.parallel.init.sources import all_tensors
from shardwise.world import init

__all__ = ["constructed", "same", "unlike", "value_faults", "values_of", "whole"]

CHECKED = ("one", "fsdp-2", "ddp-2")
"""Layouts under which the values of models of other packages are made."""


def value_faults(model: Model, run: Callable[..., Any]) -> tuple[str, list[str]]:
    """How a callable's values are made ("seeded" or "rank 0"), and what is wrong with them under any layout; ``run`` is a pool's."""
    made = {layout: values_of(model, run, layout) for layout in CHECKED}
    alone = made["one"][0]
    faults = [f"{layout}: other values than one rank's" for layout in made if not same(alone, made[layout][0])]
    faults += unlike(alone, *(constructed(model.build, seed) for seed in range(8)))
    return "rank 0" if any(notes for _, notes in made.values()) else "seeded", faults


def values_of(model: Model, run: Callable[..., Any], layout: str) -> tuple[dict[str, Tensor], list[str]]:
    """The whole tensors that ranks make of the callable, and what their notes say of a fall-back to rank 0."""
    text, num_ranks, engine = LAYOUTS[layout]
    answers = run(_seeded, num_ranks, model.build, text, engine, timeout_s=100)
    shapes = {key: tuple(tensor.shape) for key, tensor in constructed(model.build, 0).items()}
    return whole([held for held, _ in answers], shapes), answers[0][1]


def _seeded(build: Callable[[], nn.Module], layout: str, engine: str) -> tuple[dict[str, list], list[str]]:
    """What this rank holds of what a callable builds: name -> (index into the whole, values), and what its notes say of a fall-back."""
    with init(layout, device="cpu", seed=5, timeout_s=60) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fall-back to rank 0, which the note tells too
        build()  # imports its code: what that computes on one warm rank only would count as another constructor
        torch.manual_seed(1000 + world.rank)  # numbers of this rank's own, that must not be seen
        keep = {} if engine == "ddp" else {"min_unit_bytes": 0}
        model = parallelize(build, world, sharding=Sharding(engine=engine, **keep))
        runtime = runtime_of(model)
        held = {
            key: [(piece.full_index, tensor[piece.local_index].clone()) for piece in runtime.pieces(key, tensor)]
            for key, tensor in runtime.local_tensors().items()
        }
        told = [note.why for note in recipe_of(model).notes if note.name == "init" and note.why.startswith("rank0")]
        return held, told


@functools.cache
def constructed(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    """Every tensor of the constructor's own, in this process, from these random numbers."""
    for start in (torch.manual_seed, random.seed, np.random.seed):
        start(seed)
    return {name: tensor.detach() for name, tensor in all_tensors(build()).items()}


def whole(ranks_held: list[dict], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The full tensors, checked to be the same wherever two ranks hold the same piece, and to be complete."""
    found = {}
    for name, shape in shapes.items():
        dtype = next((values.dtype for held in ranks_held for _, values in held[name]), torch.float32)
        full, seen = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for held in ranks_held:
            for index, values in held[name]:
                again = seen[index]
                assert torch.equal(full[index][again].nan_to_num(), values[again].nan_to_num()), (
                    f"{name} differs by rank"
                )
                full[index] = values
                seen[index] = True
        assert seen.all(), f"{name} is not whole"
        found[name] = full
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and torch.equal(a[n].isnan(), b[n].isnan())
        and torch.equal(a[n].nan_to_num(), b[n].nan_to_num())
        for n in a
    )


def unlike(found: dict[str, Tensor], *made: dict[str, Tensor]) -> list[str]:
    """What is not as constructors that drew apart have it: empty if all is well.

    Where those agree nothing was drawn, and ``found`` must be equal to the bit; elsewhere mean and spread are theirs
    within six times the error of a sample of that size, and the largest value within a factor of two and a half. Rows that
    are zero in all of them (of the padding) are zero.
    """
    faults = [f"{name} is missing" for name in made[0].keys() - found.keys()]
    for name, value in found.items():
        wanted = [one[name] for one in made]
        first = wanted[0]
        if value.shape != first.shape or value.dtype != first.dtype:
            faults.append(f"{name}: {tuple(value.shape)} {value.dtype}, not {tuple(first.shape)} {first.dtype}")
        elif all(torch.equal(first, other) for other in wanted):
            if not torch.equal(value, first):
                faults.append(f"{name}: not the constant of the constructor")
        elif value.numel() >= 12:
            empty = (
                (torch.stack(wanted).flatten(2) == 0).all(2).all(0)
                if value.dim() > 1
                else torch.zeros(len(value), dtype=bool)
            )
            if value[empty].any():
                faults.append(f"{name}: not the zero rows of the constructor")
            faults += [f"{name}: {text}" for text in _unlike_samples(value.double(), torch.stack(wanted).double())]
    return faults


def _unlike_samples(value: Tensor, wanted: Tensor) -> list[str]:
    n, spread = value.numel(), float(wanted.std())
    if not torch.isfinite(value).all():
        return ["not finite"]
    faults = []
    if abs(float(value.mean() - wanted.mean())) > 6 * 1.3 * spread / math.sqrt(n):
        faults.append(f"mean {float(value.mean()):.3g}, not {float(wanted.mean()):.3g}")
    if abs(float(value.std()) / spread - 1) > 6 / math.sqrt(n):
        faults.append(f"std {float(value.std()):.3g}, not {spread:.3g}")
    if not 0.4 < float(value.abs().max() / wanted.abs().max()) < 2.5:
        faults.append(f"largest {float(value.abs().max()):.3g}, not {float(wanted.abs().max()):.3g}")
    return faults
