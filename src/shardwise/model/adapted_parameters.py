"""Parameters with a low-rank adapter which the code of their module multiplies by: experts stacked in one tensor, a matrix that is in no layer.

``W + s B A`` is made for each forward of the module, and lies on the instance over the parameter while that runs: nothing is renamed, and
nothing written in place. Shapes and numbers are those of PEFT (``target_parameters``): A ``[experts x rank, in]``, B ``[out, rank x experts]``
with the expert as the fast index.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from shardwise._torch.autograd import in_backward
from shardwise.errors import UnsupportedError
from shardwise.model.adapted import Adapted, Adapter, AdapterTensor


@dataclass(frozen=True)
class OfParameter:
    """How the adapter of a parameter is computed.

    Attributes:
        scale: of its product.
        num_experts: the first size of the parameter; 0: it is a matrix ``[out, in]``.
        is_turned: it is ``[experts, in, out]``, and not ``[experts, out, in]``.
    """

    scale: float
    num_experts: int = 0
    is_turned: bool = False

    @classmethod
    def read(cls, module: nn.Module, shape: tuple[int, ...], scale: float) -> "OfParameter":
        """How that of a parameter of this shape is, in its module: transformers and PEFT agree on ``is_transposed``."""
        if len(shape) == 2:
            return cls(scale)
        return cls(scale, shape[0], bool(getattr(module, "is_transposed", False)))

    def shapes(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        *_, num_outputs, num_inputs = (*shape[:-2], shape[-1], shape[-2]) if self.is_turned else shape
        num = max(self.num_experts, 1)
        return (num * rank, num_inputs), (num_outputs, rank * num)

    def factors(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Those of each expert, whose product has the shape of its weight."""
        low = low.reshape(self.num_experts, -1, low.shape[1])
        high = high.reshape(high.shape[0], -1, self.num_experts).permute(2, 0, 1)
        return (low.mT, high.mT) if self.is_turned else (high, low)


class AdaptedParameters(Adapted):
    """Over the class of a module of which some parameters have an adapter: ``lora_A.NAME.PARAMETER.weight``. The weight of a child that is
    read and not called, as the ``out_proj`` of nn.MultiheadAttention, is named as the child.

    Attributes:
        scales: of the products, by parameter.
    """

    scales: Mapping[str, float]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, which finds the adapted weights under the names of its parameters."""
        if self.adapter_is_off:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        made = []
        for name, low, high in factors_of(self):
            owner, attr = place_of(self, name)
            if attr in owner.__dict__:
                continue  # this forward is within another one of the module
            weight: Tensor = owner._parameters[attr]
            how = OfParameter.read(self, weight.shape, self.scales[name])  # type: ignore[arg-type]
            made.append((owner, attr, adapted_weight(weight, low, high, how)))
        for owner, attr, weight in made:
            object.__setattr__(owner, attr, weight)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for owner, attr, _ in made:
                object.__delattr__(owner, attr)

    def __getattr__(self, name: str) -> Any:
        """What is no attribute of the instance: a parameter too, unless a forward runs.

        Raises:
            UnsupportedError: a part of the module's forward runs again in a backward by itself, and would compute without the adapter.
        """
        found = super().__getattr__(name)  # type: ignore[misc]
        is_read_again = isinstance(found, nn.Parameter) and not self.adapter_is_off and in_backward()
        if is_read_again and any(name == each for each, _, _ in factors_of(self)):
            raise UnsupportedError(
                f"{name} of a {type(self).__name__}, read in a backward",
                why="a part of its forward is computed again there by itself, where its adapter is not: that is made for a whole forward",
                fix="leave torch.utils.checkpoint out of that forward: remat= of parallelize, of the block around it, does this",
            )
        return found


def adapted_weight(weight: Tensor, low: Tensor, high: Tensor, how: OfParameter) -> Tensor:
    """``W + s B A``, in the dtype of W."""
    if has_torch_function((weight, low, high)):
        return handle_torch_function(adapted_weight, (weight, low, high), weight, low, high, how)  # type: ignore[no-any-return]
    if not how.num_experts:
        return weight + ((high @ low) * how.scale).to(weight.dtype)
    first, second = (factor.to(weight.dtype) for factor in how.factors(low, high))
    return torch.baddbmm(weight, first, second, alpha=how.scale)


def merge_parameter_(
    low: Tensor, high: Tensor, how: OfParameter, pieces: Iterable[tuple[tuple[slice, ...], Tensor]]
) -> None:
    """Merges an adapter into pieces of its parameter, in place; each comes with where it is in the whole. The product of one expert after the
    other is made in full, and cut: the bits of a part's own product may be others."""
    for index, part in pieces:
        if not how.num_experts:
            part += ((high @ low) * how.scale)[index]
            continue
        firsts, seconds = how.factors(low, high)
        for place, expert in enumerate(range(how.num_experts)[index[0]]):
            part[place] += ((firsts[expert] @ seconds[expert]) * how.scale)[index[1:]]


def attach_parameters(module: Any, how: Mapping[str, tuple[int, float]], adapter: str) -> None:
    """Gives parameters of a module an adapter of ``(rank, scale)``, whose factors have no values yet. They are in the module's order: PEFT's
    names follow it."""
    low, high = nn.ModuleDict(), nn.ModuleDict()
    for name in (*module._parameters, *module._modules):
        if name in how:
            owner, attr = place_of(module, name)
            weight, (rank, scale) = owner._parameters[attr], how[name]
            of_low, of_high = OfParameter.read(module, weight.shape, scale).shapes(weight.shape, rank)
            low[name], high[name] = AdapterTensor(*of_low, like=weight), AdapterTensor(*of_high, like=weight)
    module.lora_A, module.lora_B = nn.ModuleDict({adapter: low}), nn.ModuleDict({adapter: high})
    module.adapter, module.adapter_name = Adapter(), adapter
    module.scales = {name: scale for name, (_, scale) in how.items()}
    module.__class__ = _class_over(type(module))


def place_of(module: Any, name: str) -> tuple[Any, str]:
    """The module that holds what an adapter's name means in ``module``, and its attribute."""
    return (module, name) if name in module._parameters else (module._modules[name], "weight")


def factors_of(module: Any) -> list[tuple[str, Tensor, Tensor]]:
    """``(parameter, A, B)`` of each parameter with an adapter."""
    low, high = module.lora_A[module.adapter_name], module.lora_B[module.adapter_name]
    return [(name, low[name].weight, high[name].weight) for name in low]


@functools.cache
def _class_over(cls: type[nn.Module]) -> type[nn.Module]:
    return type(
        cls.__name__, (AdaptedParameters, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
