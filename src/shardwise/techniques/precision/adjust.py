"""Casts parameters that are to be stored in another dtype."""

import msgspec
from torch import nn

from shardwise.model import dtype_of
from shardwise.model.tensors import tensors_of
from shardwise.recipe import Anatomy
from shardwise.techniques.precision.options import Precision
from shardwise.techniques.precision.regions import stored_as


def adjust(module: nn.Module, anatomy: Anatomy, *, precision: Precision) -> Anatomy:
    """Casts parameters of ``module`` to the storage dtypes of ``precision``, and returns the new anatomy."""
    parameters, facts = tensors_of(module, "_parameters"), dict(anatomy.params)
    for name, dtype in stored_as(anatomy, precision).items():
        parameters[name].data = parameters[name].data.to(dtype_of(dtype))
        facts[name] = msgspec.structs.replace(facts[name], dtype=dtype)
    return msgspec.structs.replace(anatomy, params=facts)
