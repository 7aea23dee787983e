"""Linear layers whose weight is computed from other parameters (weight norm, spectral norm, an adapter added to it) by
``torch.nn.utils.parametrize``."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shardwise.model.names import canonical_modules, canonical_tensors

__all__ = ["computed_weights", "with_plain_weights"]


def computed_weights(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of each computed weight of a linear layer, as ``up.weight`` -> canonical names of the parameters from which it is
    computed. A weight that is computed from a parameter which is used elsewhere too is left out."""
    names, holders = dict[int, str](), Counter[int]()
    for name, owner, attr in canonical_tensors(module, "_parameters"):
        names[id(owner._parameters[attr])] = name
    for child in module.modules():
        holders.update(id(param) for param in child._parameters.values() if param is not None)
    found = {}
    for name, child in canonical_modules(module):
        if type(child).forward is not nn.Linear.forward or not is_parametrized(child):
            continue
        lists = child.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        originals = [id(param) for param in lists.parameters()]
        if [*lists] == ["weight"] and all(holders[key] == 1 for key in originals):
            found[f"{name}.weight".lstrip(".")] = tuple(names[key] for key in originals)
    return found


def with_plain_weights(module: nn.Module, computed: Iterable[str]) -> dict[str, nn.Parameter]:
    """Gives layers of ``module``, in place, a weight of their own on meta in place of the computed one. Returns them, by name."""
    made = {}
    for name in computed:
        layer = module.get_submodule(name.rpartition(".")[0])
        assert isinstance(layer, nn.Linear)
        layer.__class__ = type(layer).__mro__[1]  # below the one that parametrize has put on top of it
        del layer._modules["parametrizations"]
        shape = (layer.out_features, layer.in_features)
        layer.weight = made[name] = nn.Parameter(torch.empty(shape, dtype=torch.float64, device="meta"))
    return made
