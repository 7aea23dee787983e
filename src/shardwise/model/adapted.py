"""Linear layers with a low-rank adapter beside their weight (LoRA, DoRA): one function of all their tensors, and the class of such layers.

``y = W x + s B A x`` with ``s = alpha / rank``, or ``alpha / sqrt(rank)`` (LoRA, https://arxiv.org/abs/2106.09685; rsLoRA,
https://arxiv.org/abs/2312.03732). DoRA (https://arxiv.org/abs/2402.09353) multiplies each output by ``m / n``, its magnitude over the norm of
its row of ``W + s B A``, through which no gradient goes. The numbers are those of PEFT.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.config.keywords import public_call
from shardwise.errors import UnsupportedError, UsageError
from shardwise.model.layers import BUFFER, LAYER_FUNCTIONS
from shardwise.model.names import canonical_modules
from shardwise.model.nf4 import PackedProduct, Packing, unpack


@dataclass(frozen=True)
class Adapter:
    """How an adapter is computed.

    Attributes:
        scale: of its product.
        dropout: probability with which inputs of A are dropped in training.
        out_dim: the dim of the weight along which the outputs lie: 0 of nn.Linear, 1 of GPT-2's Conv1D.
        sum_over_inputs: sums over ranks of which each has a part of the inputs; None: all inputs are here.
        packing: what of the weight's 4-bit codes is here; None: the weight is plain.
    """

    scale: float = 0.0
    dropout: float = 0.0
    out_dim: int = 0
    sum_over_inputs: Callable[[Tensor], Tensor] | None = None
    packing: Packing | None = None


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    high: Tensor | None,
    magnitude: Tensor | None,
    scales: Tensor | None,
    outer: Tensor | None,
    mean: Tensor | None,
    how: Adapter,
    training: bool,
) -> Tensor:
    """The outputs of a linear layer with an adapter, or with a weight in 4 bits, or both.

    Args:
        x: inputs ``[..., in]``.
        weight: ``[out, in]``, or ``[in, out]`` where ``how.out_dim`` is 1; or its bytes ``[out, in / 2]``.
        bias: ``[out]``, or None.
        low: A, ``[rank, in]``; None: there is no adapter.
        high: B, ``[out, rank]``.
        magnitude: m of DoRA, ``[out]``, or None.
        scales: the codes of all scales of a weight in bytes; None: the weight is plain.
        outer: the largest magnitude of each group of scales, ``[groups]``.
        mean: of the scales.
        how: the rest.
        training: whether inputs of A are dropped.
    """
    tensors = (x, weight, bias, low, high, magnitude, scales, outer, mean)
    given = tuple(each for each in tensors if each is not None)
    if has_torch_function(given):
        return handle_torch_function(adapted_linear, given, *tensors, how, training)
    if scales is not None:
        packed = weight, scales, outer, mean
        base = functools.partial(_packed_linear, packed, how.packing)
    else:
        base = functools.partial(_linear, weight, how.out_dim)
    if low is None or high is None:
        return base(x, bias)
    dropped = functional.dropout(x, how.dropout, training) if how.dropout else x
    part = functional.linear(functional.linear(dropped.to(low.dtype), low), high) * how.scale
    if magnitude is None:
        y = base(x, bias)
        return (y + part).to(y.dtype)
    y = base(x, None)
    plain = weight if scales is None else unpack(weight, scales, outer, mean, how.packing, x.dtype)  # type: ignore[arg-type]
    factor = magnitude / row_norms(plain, low, high, how).to(magnitude.dtype)
    of_dropped = y if dropped is x or not training else base(dropped, None)
    result = y + (factor - 1) * of_dropped + factor * part
    return (result if bias is None else result + bias).to(y.dtype)


LAYER_FUNCTIONS[adapted_linear] = ((None, "in"), ("out", None), ("out",), (None, None), BUFFER, BUFFER)


def _packed_linear(packed: Any, packing: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    y = PackedProduct.apply(x, packing, *packed)
    return y if bias is None else y + bias


def _linear(weight: Tensor, out_dim: int, x: Tensor, bias: Tensor | None) -> Tensor:
    if out_dim == 0:
        return functional.linear(x, weight, bias)
    if bias is None:
        return x @ weight
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


def row_norms(weight: Tensor, low: Tensor | None, high: Tensor | None, how: Adapter) -> Tensor:
    """The norm ``[out]`` of each output's row of ``W + s B A``, or of W alone, in float32 or more, without gradients."""
    with torch.no_grad():
        rows = weight if how.out_dim == 0 else weight.t()
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if low is not None and high is not None:
            rows = rows + how.scale * (high @ low).to(rows.dtype)
        if how.sum_over_inputs is None:
            return torch.linalg.norm(rows, dim=1)
        return how.sum_over_inputs(rows.square().sum(1)).sqrt()


def merge_(part: Tensor, index: tuple[slice, ...], change: Tensor, factor: Tensor | None, how: Adapter) -> None:
    """Merges an adapter into a part of its weight, in place.

    Args:
        part: of the weight.
        index: where it is in the whole weight.
        change: ``s B A``, from :func:`change_of`.
        factor: ``m / n`` of DoRA, ``[out]``; None: it has none.
        how: the rest.
    """
    part += change[index]
    if factor is not None:
        of_rows = factor[index[how.out_dim]]
        part *= of_rows[:, None] if how.out_dim == 0 else of_rows


def change_of(low: Tensor, high: Tensor, how: Adapter) -> Tensor:
    """What an adapter adds to its weight, in the weight's shape."""
    change = (high @ low) * how.scale
    return change if how.out_dim == 0 else change.t()


class AdapterTensor(nn.Module):
    """Holds one tensor of an adapter, under the name that PEFT gives it: ``weight``."""

    def __init__(self, *shape: int, like: Tensor):
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=like.device))


class Adapted:
    """Over the class of a layer with an adapter.

    Attributes:
        adapter: how it is computed.
        adapter_name: in the names of its tensors: ``lora_A.NAME.weight``.
        adapter_is_off: the layer is computed without it.
    """

    adapter: Adapter
    adapter_name: str
    adapter_is_off: bool = False

    def alone(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the layer without its adapter."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def only(args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor:
    """The one argument of a layer, however it is given."""
    (x,) = (*args, *kwargs.values())
    return x


class AdaptedLinear(Adapted):
    """Over the class of a linear layer, whose forward is that of nn.Linear or Conv1D: computes it and its adapter as one function."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The outputs of the layer and of its adapter, for ``input``, or ``x`` as a Conv1D calls it."""
        if self.adapter_is_off:
            return self.alone(*args, **kwargs)
        return self.compute(only(args, kwargs), self.bias)  # type: ignore[attr-defined]

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        plain = None, None, None
        return adapted_linear(x, self.weight, bias, *adapter_tensors(self), *plain, self.adapter, self.training)  # type: ignore[attr-defined, arg-type]


class AdaptedAround(Adapted):
    """Over the class of a linear layer with a forward of its own: adds the product of the adapter to what that returns. To tensor
    parallelism A and B are layers of their own then."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.alone(x, *args, **kwargs)
        if self.adapter_is_off:
            return y
        low, high, _ = adapter_tensors(self)
        dropped = functional.dropout(x, self.adapter.dropout, self.training)  # type: ignore[attr-defined]
        part = functional.linear(functional.linear(dropped.to(low.dtype), low), high) * self.adapter.scale
        return (y + part).to(y.dtype)


class AdaptedEmbedding(Adapted):
    """Over the class of an embedding: adds the rows of the product ``(B A).T``, A being ``[rank, tokens]`` and B ``[width, rank]``."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        ids, y = only(args, kwargs), self.alone(*args, **kwargs)
        if self.adapter_is_off:
            return y
        low, high, _ = adapter_tensors(self)
        rows = functional.embedding(ids, low.t(), self.padding_idx)  # type: ignore[attr-defined]
        return (y + functional.linear(rows, high) * self.adapter.scale).to(y.dtype)


def adapter_tensors(layer: Any) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter | None]:
    name = layer.adapter_name
    if isinstance(layer, AdaptedEmbedding):
        return layer.lora_embedding_A[name], layer.lora_embedding_B[name], None  # type: ignore[attr-defined]
    vector = getattr(layer, "lora_magnitude_vector", None)
    return layer.lora_A[name].weight, layer.lora_B[name].weight, vector[name].weight if vector else None


def out_dim_of(layer: nn.Module) -> int | None:
    """The dim of a linear layer's weight along which its outputs lie: 0 of nn.Linear, 1 of transformers' Conv1D; None: it is none of these."""
    kind = _linear_class(type(layer))
    return None if kind is None else int(kind is not nn.Linear)


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a linear layer's class computes something else than nn.Linear, or Conv1D, does."""
    kind = _linear_class(type(layer))
    return kind is None or type(layer).forward not in (kind.forward, AdaptedLinear.forward)


def _linear_class(cls: type) -> Any:
    """nn.Linear or Conv1D, whichever a class is derived from."""
    conv = (
        each for each in cls.__mro__ if (each.__module__, each.__name__) == ("transformers.pytorch_utils", "Conv1D")
    )
    return nn.Linear if issubclass(cls, nn.Linear) else next(conv, None)


@functools.cache
def adapted_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer of class ``cls`` with an adapter, under the same name."""
    kind = _linear_class(cls)
    over = AdaptedEmbedding if kind is None else AdaptedLinear if cls.forward is kind.forward else AdaptedAround
    return type(cls.__name__, (over, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Name -> layer, of each layer of a module that has an adapter."""
    first: dict[int, str] = {}
    found = [(name, layer) for name, layer in canonical_modules(module) if isinstance(layer, Adapted)]
    return {name: layer for name, layer in found if first.setdefault(id(layer), name) == name}


def adapter_switches(modules: Iterable[nn.Module]) -> list[tuple[Any, str]]:
    """``(layer, attribute that says whether it is off)`` of layers with adapters, and of what PEFT has wrapped beside them."""
    return [
        (layer, "adapter_is_off" if isinstance(layer, Adapted) else "_disable_adapters")
        for layer in modules
        if isinstance(layer, Adapted) or "_disable_adapters" in vars(layer)
    ]


@contextlib.contextmanager
def adapters_as(switches: Iterable[tuple[Any, str]], values: Iterable[bool]) -> Iterator[None]:
    """Context manager: adapters are off where ``values`` say so."""
    changed = [
        (layer, attr, to) for (layer, attr), to in zip(switches, values, strict=True) if getattr(layer, attr) != to
    ]
    for layer, attr, value in changed:
        setattr(layer, attr, value)
    try:
        yield
    finally:
        for layer, attr, value in changed:
            setattr(layer, attr, not value)


@public_call()
@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Context manager: layers are computed without their adapters, so that the model gives the answers of its frozen base: a reference
    model that needs no memory. What is trained in full beside them has no base left, but in a model of PEFT, which keeps it.

    Args:
        model: with adapters (``parallelize(..., lora=...)``, or PEFT's). Every rank must enter it.

    Raises:
        UnsupportedError: a parameter is trained in full, of which no value of the base is left.
        UsageError: it has no adapters.

    Example:
        >>> with adapter_off(model), torch.no_grad():  # doctest: +SKIP
        ...     reference = model(**batch)
    """
    switches = adapter_switches(model.modules())
    if not switches:
        raise UsageError(
            f"adapter_off of a {type(model).__name__}",
            why="none of its layers has an adapter",
            fix="give the model that parallelize(..., lora=sw.LoRA(...)) returned",
        )
    if name := _trained_base(model):
        raise UnsupportedError(
            f"adapter_off of a {type(model).__name__} with more than adapters trained",
            why="it is trained in full, and its value in the base is not kept: the answers would be those of neither model",
            fix="train adapters alone: leave LoRA(train=...) out, or name linear layers and embeddings in LoRA(targets=...); or load the base "
            "into a second model",
            name=name,
        )
    with adapters_as(switches, [True] * len(switches)):
        yield


def _trained_base(model: nn.Module) -> str | None:
    """A parameter that is trained and that is no adapter, nor PEFT's copy of a module (``modules_to_save``)."""
    own: set[int] = set()
    for layer, _ in adapter_switches(model.modules()):
        is_of_peft = "_disable_adapters" in vars(layer)
        for name, child in layer.named_children():
            if name not in ("base_layer", "original_module") if is_of_peft else name.startswith("lora_"):
                own.update(map(id, child.parameters()))
    found = ((name, param) for name, param in model.named_parameters() if param.requires_grad)
    return next((name for name, param in found if id(param) not in own), None)
