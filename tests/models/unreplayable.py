"""Constructors whose values cannot be made again from a record of them, and those that leave values unwritten."""

import random

import numpy as np
import torch
from torch import nn

from models.constructors import Holder
from models.record import Model

# ---- what cannot be replayed ----------------------------------------------------------------------------------------


def from_numpy_random():
    return Holder(weight=nn.Parameter(torch.from_numpy(np.random.randn(6, 5)).float()))


def from_python_random():
    return Holder(weight=nn.Parameter(torch.full((6, 5), random.random())))


def from_item():
    return Holder(weight=nn.Parameter(torch.full((6, 5), torch.rand(3)[1].item())))


def from_item_of_nothing():
    return Holder(weight=nn.Parameter(torch.full((6, 5), torch.empty(3)[1].item())))


def from_array():
    return Holder(weight=nn.Parameter(torch.randn(6, 5)), rates=torch.arange(3.0).numpy().tolist())


def from_meta_of_before(given=torch.empty(6, 5, device="meta")):  # noqa: B008
    return Holder(weight=nn.Parameter(given * 2))


def from_own_generator():
    generator = torch.Generator(device="cpu").manual_seed(7)
    return Holder(weight=nn.Parameter(torch.randn(6, 5, generator=generator, device="cpu")))


def from_numpy_generator():
    return Holder(weight=nn.Parameter(torch.from_numpy(np.random.default_rng().normal(size=(6, 5))).float()))


def from_listed_numbers():
    numbers = np.random.default_rng().normal(size=(6, 5)).tolist()
    return Holder(weight=nn.Parameter(torch.tensor(numbers)))


def from_the_rank():
    import os

    return Holder(weight=nn.Parameter(torch.full((6, 5), float(os.environ.get("RANK", "0")))))


def with_drawn_attributes():
    """Numbers that no tensor holds, from all three sources."""
    return Holder(
        weight=nn.Parameter(torch.randn(6, 5)),
        python=random.random(),
        array=np.random.randn(3),
        order=np.random.permutation(5).tolist(),
    )


def with_a_real_draw():
    """A number looked at while building: the tape sees a constant."""
    return Holder(weight=nn.Parameter(torch.full((6, 5), torch.rand(1, device="cpu").item())))


# ---- what is never written ---------------------------------------------------------------------------------------------


def unwritten(dtype: str = "float32"):
    real = getattr(torch, dtype)
    empty = torch.empty(4, 3, dtype=real)
    empty[:2] = 1
    return Holder(a=nn.Linear(2, 2), b=Holder(late=nn.Parameter(empty) if real.is_floating_point else empty))


def unwritten_legacy():
    return Holder(late=nn.Parameter(torch.Tensor(3, 4)))


def unwritten_ints():
    return unwritten("int64")


def unwritten_flags():
    return unwritten("bool")


MODELS = tuple(
    Model(name=made.__name__, build=made, tags=("constructor",), hard="its values cannot be replayed")
    for made in (
        from_numpy_random,
        from_python_random,
        from_item,
        from_item_of_nothing,
        from_array,
        from_meta_of_before,
        from_own_generator,
        from_numpy_generator,
        from_listed_numbers,
        from_the_rank,
        with_drawn_attributes,
        with_a_real_draw,
        unwritten,
        unwritten_legacy,
        unwritten_ints,
        unwritten_flags,
    )
)
