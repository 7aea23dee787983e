"""Linear layers whose weight is computed from other parameters (weight norm, spectral norm, an adapter added to it) by
``torch.nn.utils.parametrize``."""

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from shardwise.model.names import canonical_modules, canonical_tensors
from shardwise.model.pytrees import leaves_of


def computed_weights(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of each computed weight of a linear layer, as ``up.weight`` -> canonical names of the parameters from which it is
    computed.

    Left out is one that is computed from what is used elsewhere too, since gradients of two kinds would meet there; of a layer
    with another forward; or within a computation of another weight.
    """
    names, places = dict[int, str](), Counter[int]()
    for name, owner, attr in canonical_tensors(module, "_parameters"):
        names[id(owner._parameters[attr])] = name
    for _, child in module.named_modules(remove_duplicate=False):
        places.update(id(param) for param in child._parameters.values() if param is not None)
    found = {}
    for name, child in canonical_modules(module):
        if type(child).forward is not nn.Linear.forward or "forward" in vars(child) or ".parametrizations." in name:
            continue
        if not is_parametrized(child):
            continue
        lists = child.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        if [*lists] != ["weight"] or not _is_by_itself(module, lists["weight"]):
            continue
        originals = [id(param) for param in lists.parameters()]
        if all(places[key] == 1 for key in originals):
            found[f"{name}.weight".lstrip(".")] = tuple(names[key] for key in originals)
    return found


class _Seen(TorchFunctionMode):
    """Within: notes the tensors that functions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids |= {id(x) for x in leaves_of([args, kwargs or {}]) if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def _is_by_itself(root: nn.Module, computation: nn.Module) -> bool:
    """Whether a weight can be computed from the tensors of ``computation`` alone. A copy of it is run, without gradients."""
    own = {id(part) for part in computation.modules()}
    others = [part for part in root.modules() if id(part) not in own]
    inside = {id(x) for x in (*computation.parameters(), *computation.buffers())}
    outside = [x for x in (*root.parameters(), *root.buffers()) if id(x) not in inside]
    memo: dict[int, Any] = {id(x): x for x in (*others, *outside)}  # what it refers to is not copied
    try:
        copied = copy.deepcopy(computation, memo)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _Seen() as seen:
            copied()
    except Exception:  # of the user's code, whatever it is: the layer stays whole then
        return False
    return seen.ids.isdisjoint(map(id, outside))


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
