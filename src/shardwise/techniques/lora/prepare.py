"""Puts adapters beside linear layers, before the module is read, and freezes all else."""

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from shardwise.errors import PlanError, UnsupportedError, UsageError
from shardwise.model.adapted import (
    Adapted,
    AdaptedEmbedding,
    Adapter,
    AdapterTensor,
    adapted_class,
    adapted_layers,
    adapter_tensors,
    has_own_forward,
    out_dim_of,
    row_norms,
)
from shardwise.model.adapted_parameters import AdaptedParameters, attach_parameters, factors_of
from shardwise.model.adopted import adopt, is_of_peft
from shardwise.model.names import canonical_modules, canonical_tensors
from shardwise.model.packed import is_of_bitsandbytes
from shardwise.recipe.patterns import names_meant
from shardwise.techniques.linears import (
    classes_of,
    in_no_layer,
    left_out,
    matches_nothing,
    names_matching,
    without_fast_paths,
)
from shardwise.techniques.lora.options import ALL_LINEAR, LoRA
from shardwise.techniques.lora.parameters import chosen_parameters, why_not_attention
from shardwise.world import World
from shardwise.world.rng import derive_seed


def prepare(module: nn.Module, world: World | None, device: torch.device | None, *, lora: LoRA | None) -> nn.Module:
    """``module``, whose chosen layers have an adapter, and of which nothing else is trained than ``lora.train`` names. Without ``lora`` its
    layers that PEFT has given adapters are adopted.

    The class of such a layer becomes a subclass of itself, of the same name; names of modules and tensors stay.

    Raises:
        PlanError: a name that means no layer.
        UnsupportedError: a layer that is computed in a way which an adapter beside it would not be part of.
        UsageError: the module has adapters of PEFT.
    """
    if lora is None:
        adopt(module)
        without_fast_paths(module, Adapted)
        return module
    _refuse_adapted(module)
    layers, (parameters, of_weights) = _chosen(module, lora), chosen_parameters(module, lora)
    if twice := layers.keys() & of_weights:
        raise UnsupportedError(
            "an adapter of the weight of a layer, which is a target itself",
            why="targets= gives it one",
            fix="leave it out of targets=, or out of experts=",
            name=min(twice),
        )
    if of_weights:
        layers |= _chosen(module, msgspec.structs.replace(lora, targets=tuple(of_weights), exclude=()))
    attention = {name: layers.pop(name) for name in [*layers] if isinstance(layers[name], nn.MultiheadAttention)}
    if both := attention.keys() & parameters.keys():
        raise UnsupportedError(
            "an adapter of a parameter of nn.MultiheadAttention, which is a target itself",
            why="targets= gives all of its parameters one",
            fix="leave it out of targets=, or out of experts=",
            name=min(both),
        )
    parameters |= {name: ["in_proj_weight", "out_proj"] for name in attention}
    trained = _trained(module, lora)
    for param in module.parameters():
        param.requires_grad_(False)
    for name in trained:
        module.get_parameter(name).requires_grad_()
    inner = [f"{host}.{each}" for host, of in parameters.items() if host not in attention for each in of]
    classes = classes_of(layers | attention) | dict.fromkeys(inner, "")
    _refuse_meaningless(lora, classes)
    lora = lora.settled(classes)
    seed = 0 if world is None else world.seed
    for name, layer in layers.items():
        _attach(layer, name, lora, seed)
    for name, names in parameters.items():
        host = module.get_submodule(name)
        known = {each: name if name in attention else f"{name}.{each}" for each in names}
        how = {each: (lora.rank_of(own), lora.scale_of(own)) for each, own in known.items()}
        attach_parameters(host, how, lora.name)
        for each, low, high in factors_of(host):
            _begin(low, high, how[each][0], lora, _generator(low, seed, f"{name}.{each}"))
    without_fast_paths(module, Adapted)
    return module


def values_of_proof(module: nn.Module) -> None:
    """Draws B, which begins at 0, so that the gradient of A is not 0; and magnitudes, which begin at the norms that they are divided by."""
    with torch.no_grad():
        for layer in adapted_layers(module).values():
            if isinstance(layer, AdaptedParameters):
                for _, _, high in factors_of(layer):
                    high.normal_(std=0.1)
                continue
            low, high, magnitude = adapter_tensors(layer)
            (low if isinstance(layer, AdaptedEmbedding) else high).normal_(std=0.1)
            if magnitude is not None:
                magnitude.mul_(1 + 0.1 * torch.randn_like(magnitude))


def _refuse_adapted(module: nn.Module) -> None:
    for name, child in canonical_modules(module):
        if isinstance(child, Adapted) or is_of_peft(child) or hasattr(child, "lora_A"):
            raise UsageError(
                "lora= with a module that has adapters",
                why="another set of them beside the first would be trained",
                fix="leave lora= out: what the module has is trained as it is; or give the module without adapters",
                name=name,
            )
        if is_of_bitsandbytes(child):
            raise UsageError(
                "lora= with a module that holds weights of bitsandbytes in 4 bits",
                why="an adapter is put beside a plain layer, which is then packed",
                fix='build the model plain: sw.parallelize(build, world, lora=..., quantize="nf4", init="load"), then sw.load_weights(model, '
                "DIRECTORY), which reads the 4 bits of a directory as they are; or let PEFT make the adapters, and leave lora= out",
                name=name,
            )


# ---- which layers -----------------------------------------------------------------------------------------------------


def _chosen(module: nn.Module, lora: LoRA) -> dict[str, nn.Module]:
    first: dict[int, str] = {}
    modules = {n: m for n, m in canonical_modules(module) if first.setdefault(id(m), n) == n}
    linear = {name: layer for name, layer in modules.items() if out_dim_of(layer) is not None and name}
    left = left_out(module, modules, linear)
    if lora.targets == ALL_LINEAR:
        found = {
            name: layer
            for name, layer in linear.items()
            if name not in left and not _why_not(layer, modules, name, lora)
        }
        if not found and not lora.experts:
            raise PlanError(
                'LoRA(targets="all-linear")',
                why=f"{type(module).__name__} has no linear layer, other than heads, that can have one"
                + (f": {next(iter(left))} {next(iter(left.values()))}" if left else ""),
                fix="name layers: targets=(...); layers are nn.Linear, transformers' Conv1D, and nn.Embedding",
            )
    else:
        found = {}
        for pattern in lora.targets:
            matching = names_matching(modules, pattern)
            hits = {n: modules[n] for n in matching if n in linear or isinstance(modules[n], _NAMED)}
            if not hits:
                instead = "name it as a parameter: LoRA(experts={names!r})"
                raise matches_nothing(
                    "LoRA", "targets", pattern, modules, matching, linear, in_no_layer(module), instead
                )
            found |= hits
    for pattern in lora.exclude:
        if not (hits := names_matching(found, pattern)):
            raise matches_nothing("LoRA", "exclude", pattern, found, [], found)
        found = {name: layer for name, layer in found.items() if name not in hits}
    if not found and not lora.experts:
        raise PlanError(
            f"LoRA(exclude={list(lora.exclude)})", why="it excludes all targets", fix="leave some layers in"
        )
    found = {name: layer for name, layer in modules.items() if name in found}  # in the order of the module
    for name, layer in found.items():
        if why := _why_not(layer, modules, name, lora):
            raise UnsupportedError(
                f"LoRA of a {type(layer).__name__}",
                why=f"{why}, and an adapter beside it would not be part of that",
                fix="leave it out of the targets: LoRA(exclude=(...))",
                name=name,
            )
    return found


def _refuse_meaningless(lora: LoRA, classes: Mapping[str, str]) -> None:
    """Refuses a rank or an alpha of what has no adapter. ``classes``: of what has one, by name."""
    for key in ("ranks", "alphas"):
        for pattern in getattr(lora, key):
            if not names_meant(classes, pattern):
                raise matches_nothing("LoRA", key, pattern, classes, [], classes)


_NAMED = nn.Embedding, nn.MultiheadAttention  # which all-linear does not mean


def _why_not(layer: nn.Module, modules: Mapping[str, nn.Module], name: str, lora: LoRA) -> str:
    """Why an adapter would have no effect, or another one than beside a linear layer; "" if there is no reason."""
    outer = modules.get(name.rpartition(".")[0])
    if isinstance(outer, nn.MultiheadAttention):
        return "nn.MultiheadAttention, which can have one itself, reads its weight and does not call it"
    if "forward" in vars(layer):
        return "a forward was set on it"
    if isinstance(layer, nn.MultiheadAttention):
        return why_not_attention(layer, lora)
    if isinstance(layer, nn.Embedding):
        if type(layer).forward is not nn.Embedding.forward:
            return f"{type(layer).__name__} has a forward of its own"
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            return "its rows are looked up with a largest norm, or another option"
        return "DoRA is not defined for embeddings here" if lora.dora else ""
    if lora.dora and has_own_forward(layer):
        return f"{type(layer).__name__} has a forward of its own, of which DoRA would need the norms"
    if "weight" not in layer._parameters:
        return "its weight is computed from other tensors"
    return ""


def _trained(module: nn.Module, lora: LoRA) -> list[str]:
    """Canonical names of the parameters that ``train`` means: by their own name, or that of a module around them."""
    found: dict[str, None] = {}
    first: dict[int, str] = {}
    names = {}
    for name, owner, attr in canonical_tensors(module, "_parameters"):
        names[name] = first.setdefault(id(owner._parameters[attr]), name)
    for pattern in lora.train:
        hits = set(names_matching({*names, *(n for n, _ in canonical_modules(module) if n)}, pattern))
        inside = [n for n in names if any(n == hit or n.startswith(f"{hit}.") for hit in hits)]
        if not inside:
            raise matches_nothing("LoRA", "train", pattern, names, [], {n.rpartition(".")[0]: None for n in names})
        found |= dict.fromkeys(names[n] for n in inside)
    return [name for name in found if module.get_parameter(name).is_floating_point()]


# ---- their tensors -----------------------------------------------------------------------------------------------------


def _attach(layer: nn.Module, name: str, lora: LoRA, seed: int) -> None:
    """Makes a layer an adapted one, with values as PEFT begins with: B is 0, of embeddings A, so that nothing changes at first."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    generator = _generator(weight, seed, name)
    layer.adapter_name, rank, scale = lora.name, lora.rank_of(name), lora.scale_of(name)  # type: ignore[assignment]
    if isinstance(layer, nn.Embedding):
        low, high = (AdapterTensor(rank, len(weight), like=weight), AdapterTensor(weight.shape[1], rank, like=weight))
        nn.init.zeros_(low.weight)
        nn.init.normal_(high.weight, generator=generator)
        layer.lora_embedding_A = nn.ParameterDict({lora.name: low.weight})
        layer.lora_embedding_B = nn.ParameterDict({lora.name: high.weight})
        layer.adapter = Adapter(scale)  # type: ignore[assignment]
        layer.__class__ = adapted_class(type(layer))  # type: ignore[assignment]
        return
    out_dim = out_dim_of(layer) or 0
    num_outputs, num_inputs = weight.shape[out_dim], weight.shape[1 - out_dim]
    low, high = AdapterTensor(rank, num_inputs, like=weight), AdapterTensor(num_outputs, rank, like=weight)
    _begin(low.weight, high.weight, rank, lora, generator)
    how = Adapter(scale, lora.dropout, out_dim)
    layer.lora_A, layer.lora_B = nn.ModuleDict({lora.name: low}), nn.ModuleDict({lora.name: high})
    if lora.dora:
        magnitude = AdapterTensor(num_outputs, like=weight)
        with torch.no_grad():
            magnitude.weight.copy_(row_norms(weight, None, None, how))
        layer.lora_magnitude_vector = nn.ModuleDict({lora.name: magnitude})
    layer.adapter = how  # type: ignore[assignment]
    layer.__class__ = adapted_class(type(layer))


def _generator(like: torch.Tensor, seed: int, name: str) -> torch.Generator | None:
    """On meta a tape records what is drawn; a module with values draws the same under every layout, and leaves the user's generator alone."""
    return None if like.is_meta else torch.Generator(like.device).manual_seed(derive_seed(seed, "lora", name))


def _begin(low: torch.Tensor, high: torch.Tensor, rank: int, lora: LoRA, generator: torch.Generator | None) -> None:
    if lora.init == "gaussian":
        nn.init.normal_(low, std=1 / rank, generator=generator)
    else:
        nn.init.kaiming_uniform_(low, a=math.sqrt(5), generator=generator)
    nn.init.zeros_(high)
