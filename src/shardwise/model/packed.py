"""Linear layers whose frozen weight is in 4 bits (:mod:`shardwise.model.nf4`), with an adapter or without."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import UnsupportedError, UsageError
from shardwise.model.adapted import Adapted, Adapter, adapted_linear, adapter_tensors, only
from shardwise.model.names import canonical_modules
from shardwise.model.nf4 import GROUP, TABLE, Packing, dynamic_map, pack, unpack


class PackedLinear:
    """Over the class of a linear layer, with an adapter or without: its frozen weight is in 4 bits. ``weight`` is a property, made of them
    each time it is read.

    Attributes:
        packing: what of the weight is here.
        weight_dtype: of its values, where code asks for it.
        stand_in: what reading the weight gives in a run that asks who reads it; None: its values.
    """

    packing: Packing
    weight_dtype: torch.dtype
    stand_in: Tensor | None = None

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The outputs of the layer, and of its adapter if it has one that is on."""
        return self.compute(only(args, kwargs), self.bias)  # type: ignore[attr-defined]

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        how, tensors = Adapter(), (None, None, None)
        if isinstance(self, Adapted) and not self.adapter_is_off:
            how, tensors = self.adapter, adapter_tensors(self)  # type: ignore[assignment]
        how = dataclasses.replace(how, packing=self.packing)
        codes, *rest = packed_tensors(self)
        return adapted_linear(x, codes, bias, *tensors, *rest, how, self.training)  # type: ignore[attr-defined, arg-type]

    @property
    def weight(self) -> Tensor:
        """The values of the weight, or of this rank's part of it."""
        if self.stand_in is not None:
            return self.stand_in
        tensors = packed_tensors(self)
        if isinstance(tensors[0], DTensor):
            raise UsageError(
                "the weight of a layer in 4 bits, read outside of a forward",
                why="this rank has a part of its bytes, which are gathered for a forward",
                fix="sw.full_state_dict(model) has the values of all of it, on rank 0",
            )
        outer = tensors[2].dtype  # another one after module.double()
        with torch.no_grad():
            return unpack(*tensors, self.packing, self.weight_dtype if outer == torch.float32 else outer)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise UsageError(
            "setting the weight of a layer in 4 bits",
            why="its values are made of its bytes",
            fix="set it before parallelize, or load it: sw.load_weights(model, ...) packs what it loads",
        )


def packed_tensors(layer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return layer.weight_nf4, layer.weight_nf4_scales, layer.weight_nf4_outer, layer.weight_nf4_mean


def packed_layers(module: nn.Module) -> dict[str, Any]:
    """Name -> layer, of each layer of a module whose weight is in 4 bits."""
    first: dict[int, str] = {}
    found = [(name, layer) for name, layer in canonical_modules(module) if isinstance(layer, PackedLinear)]
    return {name: layer for name, layer in found if first.setdefault(id(layer), name) == name}


def pack_layer(layer: nn.Module) -> None:
    """Puts the weight of a linear layer into 4 bits, in place."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    del layer._parameters["weight"]
    with torch.no_grad():
        codes, scales, outer, mean = pack(weight)
    _put(layer, codes, scales, outer, mean)
    layer.packing, layer.weight_dtype = Packing.of((weight.shape[0], weight.shape[1])), weight.dtype  # type: ignore[assignment]
    layer.__class__ = _packed_class(type(layer))


def _put(layer: nn.Module, codes: Tensor, scales: Tensor, outer: Tensor, mean: Tensor) -> None:
    layer.weight_nf4 = nn.Parameter(codes, requires_grad=False)
    layer.weight_nf4_scales = nn.Parameter(scales, requires_grad=False)
    layer.register_buffer("weight_nf4_outer", outer)
    layer.register_buffer("weight_nf4_mean", mean)


def is_of_bitsandbytes(layer: nn.Module) -> bool:
    """Whether bitsandbytes keeps the weight of a linear layer in 4 bits. By name: it need not be installed."""
    return any(
        cls.__name__ == "Linear4bit" and cls.__module__.startswith("bitsandbytes.") for cls in type(layer).__mro__
    )


def adopt_packed(module: nn.Module) -> None:
    """Makes the layers that bitsandbytes has put into 4 bits packed ones, in place: the same bytes, in the same order."""
    for name, layer in canonical_modules(module):
        if not is_of_bitsandbytes(layer):
            continue
        weight: Any = layer.weight
        state: Any = getattr(weight, "quant_state", None)
        if why := _other_form(state):
            raise UnsupportedError(
                "a layer of bitsandbytes in 4 bits",
                why=f"{why}: weights are NF4 here, in blocks of 64 whose scales are in 8 bits, in groups of 256",
                fix='build the model plain and let it be packed here: sw.parallelize(build, world, quantize="nf4", init="load"), then '
                "sw.load_weights(model, DIRECTORY); or load it with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
                "bnb_4bit_use_double_quant=True)",
                name=name,
            )
        packing = Packing.of((int(state.shape[0]), int(state.shape[1])))
        del layer._parameters["weight"]
        codes = weight.detach().view(torch.uint8).as_subclass(Tensor).view(packing.codes_shape)
        scales, outer = state.absmax.view(packing.scales_shape), state.state2.absmax.float()
        _put(layer, codes, scales, outer, state.offset.float().reshape(()))
        layer.packing, layer.weight_dtype = packing, state.dtype  # type: ignore[assignment]
        layer.__class__ = _packed_class(nn.Linear)


def _other_form(state: Any) -> str:
    """Why what bitsandbytes says of a weight is not the form that is known here; "" if it is."""
    if state is None:
        return "its weight has not been put into 4 bits yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "a forward on the CPU has reordered its bytes"
    if state.quant_type != "nf4" or state.blocksize != 64 or len(state.shape) != 2 or state.shape[1] % 2:
        return f"it is {state.quant_type} in blocks of {state.blocksize}, of shape {list(state.shape)}"
    if not state.nested or state.state2.blocksize != GROUP:
        return "its scales are in float32 (no double quantisation)"
    tables = (state.code, TABLE), (state.state2.code, dynamic_map())
    is_known = all(torch.equal(own.cpu().float(), torch.tensor(known, dtype=torch.float32)) for own, known in tables)
    return "" if is_known else "its tables are others"


@functools.cache
def _packed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer of class ``cls`` whose weight is in 4 bits, under the same name."""
    return type(cls.__name__, (PackedLinear, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
