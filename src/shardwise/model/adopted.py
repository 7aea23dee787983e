"""Layers that PEFT has wrapped, in a model that its user has given adapters (``get_peft_model``): computed by the functions of adapted layers,
over the tensors that are there, under their names. They are known by what they have; PEFT is not imported.

A layer is adopted if it is a linear layer or an embedding with one adapter of factors A and B, with the magnitudes of DoRA or without, and if
its own code, run on small tensors, gives the same outputs and gradients. All others are left as they are.
"""

import dataclasses
import functools
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import unseen
from shardwise.errors import UsageError
from shardwise.model.adapted import (
    Adapted,
    AdaptedEmbedding,
    AdaptedLinear,
    Adapter,
    adapted_linear,
    adapter_tensors,
    has_own_forward,
    out_dim_of,
)
from shardwise.model.names import canonical_modules, canonical_tensors
from shardwise.model.packed import PackedLinear, is_of_bitsandbytes, packed_tensors
from shardwise.world.rng import forked_rng

OF_PARAMETER = "its adapter is of a parameter (target_parameters), which sw.LoRA(experts=...) trains under every layout"
"""Why an adapter of ``target_parameters`` is not adopted."""

_GATE = 1e-12
_OUT, _IN, _RANK = 5, 3, 2  # sizes of the tensors on which a layer's own code is run
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Adopted(Adapted):
    """Over the class of a layer of PEFT: the layer that it wraps is its ``base_layer``."""

    base_layer: Any

    @property
    def adapter_is_off(self) -> bool:  # type: ignore[override]
        """PEFT's own flag, that ``disable_adapter()`` sets."""
        return self._disable_adapters

    @adapter_is_off.setter
    def adapter_is_off(self, value: bool) -> None:
        self._disable_adapters = value

    def alone(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_changed(self, len(args) + len(kwargs))
        return self.base_layer(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the layer and of its adapter, for its one input."""
        _refuse_changed(self, len(args) + len(kwargs))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class AdoptedLinear(Adopted, AdaptedLinear):
    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        _refuse_changed(self)  # tensor parallelism calls this
        how, tensors, base = self.adapter, adapter_tensors(self), self.base_layer
        if self.adapter_is_off:
            how, tensors = Adapter(out_dim=how.out_dim), (None, None, None)
        if not isinstance(base, PackedLinear):
            return adapted_linear(x, base.weight, bias, *tensors, None, None, None, how, self.training)  # type: ignore[attr-defined]
        codes, *rest = packed_tensors(base)
        how = dataclasses.replace(how, packing=base.packing)
        return adapted_linear(x, codes, bias, *tensors, *rest, how, self.training)  # type: ignore[attr-defined]


class AdoptedEmbedding(Adopted, AdaptedEmbedding):
    @property
    def padding_idx(self) -> int | None:
        return self.base_layer.padding_idx


def _refuse_changed(layer: Any, num_arguments: int = 1) -> None:
    """Raises UsageError where PEFT's functions have changed, since the layer was adopted, what it computes."""
    name = layer.adapter_name
    if layer.merged_adapters:
        what, fix = (
            "adapters that were merged",
            "sw.save_weights(model, dest) writes merged weights; unmerge_adapter() here",
        )
    elif list(layer.active_adapters) != [name] or layer.scaling[name] != layer.adapter.scale:
        what, fix = "another adapter, or another scale", "choose it before parallelize"
    elif num_arguments != 1:
        what, fix = "more arguments than its input", "leave adapter_names out: the model has one adapter"
    else:
        return
    raise UsageError(
        f"a layer of PEFT with {what} after parallelize",
        why="it is computed with the adapter that it had then, on parts of its tensors",
        fix=fix,
    )


def adopt(module: nn.Module) -> None:
    """Makes layers of PEFT adapted ones, in place: their class becomes a subclass of itself, of the same name."""
    shared = _shared(module)
    for _, layer in canonical_modules(module):
        if is_of_peft(layer) and not why_not(layer, shared):
            layer.adapter_name = _adapter_of(layer)  # type: ignore[assignment]
            layer.adapter = _how(layer)  # type: ignore[assignment]
            layer.__class__ = _adopted_class(type(layer), bool(layer.lora_embedding_A))


def is_of_peft(layer: nn.Module) -> bool:
    """Whether a layer is wrapped by PEFT with an adapter of any kind, and was not adopted."""
    return "base_layer" in layer._modules and hasattr(layer, "active_adapters") and not isinstance(layer, Adopted)


def not_adopted(module: nn.Module) -> dict[str, str]:
    """Layer of PEFT that is computed as PEFT does -> why."""
    shared = _shared(module)
    return {name: why_not(layer, shared) for name, layer in canonical_modules(module) if is_of_peft(layer)}


def _shared(module: nn.Module) -> set[int]:
    """Identities of the parameters that several modules hold."""
    owners: dict[int, set[int]] = {}
    for _, owner, attr in canonical_tensors(module, "_parameters"):
        owners.setdefault(id(owner._parameters[attr]), set()).add(id(owner))
    return {param for param, of in owners.items() if len(of) > 1}


def option_of(layer: Any) -> dict[str, Any]:
    """The fields of the option that an adopted layer's adapter could have been made by."""
    name, (low, _, magnitude) = layer.adapter_name, adapter_tensors(layer)
    return {
        "rank": low.shape[0],
        "alpha": float(layer.lora_alpha[name]),
        "dropout": layer.adapter.dropout,
        "rslora": bool(layer.use_rslora.get(name)),
        "dora": magnitude is not None,
        "name": name,
    }


def why_not(layer: Any, shared: Collection[int] = ()) -> str:
    """Why a layer of PEFT cannot be adopted; "" if it can. ``shared``: parameters that several modules hold."""
    base = layer.base_layer
    if any(
        not hasattr(layer, attr)
        for attr in ("lora_A", "lora_B", "lora_embedding_A", "scaling", "lora_dropout", "merged_adapters")
    ):
        return "its adapter is not LoRA"
    if len({*layer.lora_A, *layer.lora_embedding_A}) != 1 or list(layer.active_adapters) != [
        name := _adapter_of(layer)
    ]:
        return "it has several adapters, or none that is active"
    if layer.merged_adapters or layer.disable_adapters:
        return "its adapter is merged or switched off"
    how = _how(layer)
    if not (how.scale > 0 and how.dropout < 1):
        return "it has no effect: its scale is 0, or its dropout 1"
    factors = (param for key, param in layer.named_parameters() if not key.startswith("base_layer."))
    if any(id(param) in shared for param in factors):
        return "its factors are those of another layer too"
    is_table = name in layer.lora_embedding_A
    is_own = type(base).forward is not nn.Embedding.forward if is_table else has_own_forward(base)
    if is_own and hasattr(layer, "parameter_name"):
        return OF_PARAMETER
    if is_own and not _is_packed(base):
        return f"{type(base).__name__} has a forward of its own"
    if is_table and (base.max_norm is not None or base.scale_grad_by_freq or base.sparse):
        return "its rows are looked up with a largest norm, or another option"
    within = [each for each in layer.modules() if each is not layer]
    if "forward" in vars(layer) or any(
        "forward" in vars(each) or any(vars(each)[key] for key in _HOOKS) for each in within
    ):
        return "a forward or a hook was set on it"
    if name in layer.lora_variant and not layer.lora_magnitude_vector:
        return f"its adapter is a {type(layer.lora_variant[name]).__name__}"
    if not is_table and layer.lora_B[name].bias is not None:
        return "its adapter has a bias"
    try:
        with unseen(), forked_rng(7):
            return _differs(layer)
    except Exception as error:  # of code that is not known here
        return f"its own code does not run on small tensors ({type(error).__name__})"


def _is_packed(base: nn.Module) -> bool:
    return isinstance(base, PackedLinear) or is_of_bitsandbytes(base)  # these become packed ones


def _adapter_of(layer: Any) -> str:
    return next(iter((*layer.lora_A, *layer.lora_embedding_A)))


def _how(layer: Any) -> Adapter:
    name = _adapter_of(layer)
    return Adapter(layer.scaling[name], getattr(layer.lora_dropout[name], "p", 0.0), out_dim_of(layer.base_layer) or 0)


@functools.cache
def _adopted_class(cls: type[nn.Module], is_table: bool) -> type[nn.Module]:
    over = AdoptedEmbedding if is_table else AdoptedLinear
    return type(cls.__name__, (over, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


# ---- the proof ---------------------------------------------------------------------------------------------------------


def _differs(layer: Any) -> str:
    """Runs a layer's own code, and ours, on small tensors in float64. Why they are not the same; "" if they are."""
    small = _small(layer)
    ours = _small(layer)
    ours.adapter_name, ours.adapter = _adapter_of(layer), _how(layer)
    ours.__class__ = _adopted_class(type(layer), bool(layer.lora_embedding_A))
    inputs = torch.randn(2, 4, _IN, dtype=torch.float64, device="cpu")
    if isinstance(ours, AdoptedEmbedding):
        inputs = torch.tensor([[0, 2, 1], [2, 2, 0]], device="cpu")
    for training in (False, True):
        found = []
        for each in (small, ours):
            with forked_rng(11), torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x = inputs.clone().requires_grad_(inputs.is_floating_point())
                each.train(training)
                y = each(x)
                leaves = [t for t in (x, *each.parameters()) if t.requires_grad]
                found.append([y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)])
        for theirs, mine in zip(*found, strict=True):
            theirs, mine = (torch.zeros((), device="cpu") if t is None else t for t in (theirs, mine))
            if theirs.shape != mine.shape or not torch.allclose(theirs, mine, rtol=_GATE, atol=_GATE):
                return f"{type(layer).__name__} computes something else than LoRA or DoRA"
    return ""


def _small(layer: Any) -> Any:
    """A copy of a layer of PEFT with small tensors, drawn from one seed."""
    name, base = _adapter_of(layer), layer.base_layer
    generator = torch.Generator("cpu").manual_seed(3)

    def draw(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu"))

    sizes = (_OUT, _IN) if out_dim_of(base) == 0 else (_IN, _OUT)
    tensors: dict[str, Tensor | None] = {
        "weight": draw(*sizes),
        "bias": None if getattr(base, "bias", None) is None else draw(_OUT),
    }
    for key, tensor in tensors.items():  # of a trained base the gradients are compared too
        is_trained = base._parameters.get(key) is not None and base._parameters[key].requires_grad
        tensors[key] = tensor if tensor is None else tensor.requires_grad_(is_trained)
    kind = nn.Linear if _is_packed(base) else type(base)
    children: dict[str, Any] = {"base_layer": _copied(base, tensors, {}, kind), "lora_dropout": layer.lora_dropout}
    if name in layer.lora_embedding_A:
        for key, value in (("lora_embedding_A", draw(_RANK, _IN)), ("lora_embedding_B", draw(_OUT, _RANK))):
            children[key] = nn.ParameterDict({name: value})
    else:
        for key, value in (("lora_A", draw(_RANK, _IN)), ("lora_B", draw(_OUT, _RANK))):
            children[key] = nn.ModuleDict(
                {name: _copied(getattr(layer, key)[name], {"weight": value, "bias": None}, {})}
            )
    if layer.lora_magnitude_vector:
        vector = _copied(layer.lora_magnitude_vector[name], {"weight": draw(_OUT)}, {})
        children["lora_magnitude_vector"] = nn.ModuleDict({name: vector})
    return _copied(layer, {}, {**layer._modules, **children})


def _copied(module: Any, tensors: Mapping[str, Any], children: Mapping[str, Any], kind: Any = None) -> Any:
    """A module with the attributes of another, and these tensors and children."""
    made = object.__new__(kind or type(module))
    made.__dict__.update(vars(module), _parameters=dict(tensors), _modules=dict(children), _buffers={})
    if "nf" in vars(made):  # of a Conv1D
        made.nf = _OUT
    return made


def weight_name(name: str, layer: Any) -> str:
    """The name of the weight that an adapter is beside, of the adapted layer ``name``."""
    return f"{name}.base_layer.weight" if isinstance(layer, Adopted) else f"{name}.weight"
