"""What adapters change in a sharded module: nothing but what is checked here; their tensors are ordinary parameters. And how they are
loaded, merged and stored."""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import UnsupportedError, UsageError
from shardwise.model import is_pretrained, user_class
from shardwise.model.adapted import (
    Adapted,
    AdaptedAround,
    AdaptedEmbedding,
    Adapter,
    adapted_layers,
    change_of,
    merge_,
    row_norms,
)
from shardwise.model.adapted_parameters import AdaptedParameters, OfParameter, merge_parameter_
from shardwise.model.adopted import weight_name
from shardwise.model.peft_names import names_of_peft
from shardwise.recipe import Recipe
from shardwise.techniques.lora.peft_files import files_of
from shardwise.techniques.lora.rule import LoRAEntry, own_names, parameters_of, trained_beside, weight_named
from shardwise.techniques.technique import Act, AdapterFiles, Merge, Whole
from shardwise.world import World


class LoRAAct(Act):
    """Checks that the module is the one whose layers the recipe names."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        if "lora" not in recipe.techniques:
            return
        entry = recipe.entry("lora", LoRAEntry)
        missing = [name for name in entry.layers if name not in adapted_layers(module)]
        if missing:
            raise UsageError(
                "a module without the adapters of the recipe",
                why="the recipe was made for a module with them",
                fix="make the recipe from this module: parallelize(..., lora=) does",
                name=missing[0],
            )

    def own_names(self, recipe: Recipe) -> list[str]:
        return own_names(recipe)

    def meaning(self, recipe: Recipe) -> Mapping[str, Any]:
        if "lora" not in recipe.techniques:
            return {}
        entry = recipe.entry("lora", LoRAEntry)
        own = {name: round(scale, 12) for name, scale in entry.scales.items()}
        return {"scale of adapters": own or round(entry.scale, 12)}

    def loaded(self, runtime: Any, names: Collection[str], whole: Whole) -> None:
        """The magnitudes of DoRA are the norms of the loaded weights, until an adapter is trained or loaded: then its B is not 0."""
        follow = [
            (weight, parts, how)
            for weight, parts, how in _layers(runtime)
            if len(parts) == 3 and weight in names and parts[2] not in names
        ]
        if not follow:
            return
        here = [bool(runtime.local_tensor_of(high).any()) for _, (_, high, _), _ in follow]
        trained = [any(each) for each in zip(*runtime.world.gather(here), strict=True)]
        for (weight, (_, _, magnitude), how), is_trained in zip(follow, trained, strict=True):
            if not is_trained:
                norms = whole([weight], functools.partial(row_norms, low=None, high=None, how=how))
                for piece, part in runtime.parts(magnitude, runtime.local_tensor_of(magnitude)):
                    part.copy_(norms[piece.full_index])

    def merged(self, runtime: Any, whole: Whole) -> Mapping[str, Merge]:
        layers = list(_layers(runtime))
        _refuse_others(runtime.recipe, "merged into the weights")
        for weight, (low, *_), _ in layers:
            _refuse_tie(runtime, weight, low)
        for name, layer in adapted_layers(runtime.module).items() if layers else ():
            _refuse_own_forward(layer, name)
        found = {}
        for weight, (low, high, *vector), how in layers:
            factor = whole([weight, low, high, *vector], functools.partial(_factor, how=how)) if vector else None
            of_adapter = whole([low], _as_it_is), whole([high], _as_it_is), factor
            found[weight] = functools.partial(_merge, *of_adapter, how)
        return found | _merged_parameters(runtime, whole)

    def adapter_files(self, runtime: Any, prefix: str) -> AdapterFiles | None:
        recipe = runtime.recipe
        if "lora" not in recipe.techniques:
            return None
        entry = recipe.entry("lora", LoRAEntry)
        _refuse_others(recipe, "in PEFT's files")
        if entry.unsaved:
            raise UnsupportedError(
                "adapters of PEFT, in its files",
                why=entry.unsaved,
                fix="write the merged model: sw.save_weights(model, dest)",
                name=entry.layers[0],
            )
        stored = {name: param.aliases for name, param in recipe.params.items()}
        stored |= {name: buffer.aliases for name, buffer in recipe.buffers.items() if buffer.persistent}
        names = names_of_peft(runtime.module)
        real = {names.bare(name): name for name in stored if name not in names.copies(stored)}
        layers = adapted_layers(runtime.module)
        found = files_of(
            entry,
            prefix=prefix,
            own=own_names(recipe),
            stacks=parameters_of(recipe),
            trained=[*map(names.bare, trained_beside(recipe))],
            stored={bare: [*map(names.bare, stored[name])] for bare, name in real.items()},
            modules=[*dict.fromkeys(names.bare(name) for name, _ in runtime.modules if name)],
            is_turned=any(layer.adapter.out_dim == 1 for layer in layers.values()),
            task=_task_of(dict(runtime.modules)[prefix.rstrip(".")], recipe),
        )
        keys, beside = ({key: real[bare] for key, bare in of.items()} for of in (found.keys, found.beside))
        return replace(found, keys=keys, beside=beside)


def _layers(runtime: Any) -> Iterator[tuple[str, list[str], Adapter]]:
    """``(canonical name of its weight, those of A, B and, for DoRA, m, how it is computed from full tensors)`` of each adapted layer."""
    recipe: Recipe = runtime.recipe
    if "lora" not in recipe.techniques:
        return
    entry = recipe.entry("lora", LoRAEntry)
    homes = {alias: name for name, param in recipe.params.items() for alias in (name, *param.aliases)}
    parts: dict[str, list[str]] = {}
    for name in sorted(own_names(recipe)):  # A, B, m
        parts.setdefault(name[: name.rfind(".lora_")], []).append(name)
    layers = adapted_layers(runtime.module)
    for name in entry.layers:
        layer = layers[name]
        if isinstance(layer, AdaptedParameters):
            continue
        weight = weight_name(name, layer)  # of a packed one no parameter has the name
        yield homes.get(weight, weight), parts[name], Adapter(layer.adapter.scale, out_dim=_out_dim(layer))


def _refuse_others(recipe: Recipe, what: str) -> None:
    """Refuses a model of PEFT with layers that were not adopted."""
    others = recipe.entry("lora", LoRAEntry).as_they_are if "lora" in recipe.techniques else {}
    for name, why in others.items():
        raise UnsupportedError(
            f"adapters of PEFT {what}",
            why=f"this layer is computed by PEFT's own code: {why}",
            fix="load sw.full_state_dict(model) into the PEFT model in one process, and let PEFT save or merge it; "
            "save_weights(model, dest, merge=False) writes all tensors under their names",
            name=name,
        )


def _merged_parameters(runtime: Any, whole: Whole) -> dict[str, Merge]:
    """Parameter with an adapter -> merges it."""
    found: dict[str, Merge] = {}
    if "lora" not in runtime.recipe.techniques:
        return found
    adapter, modules = runtime.recipe.entry("lora", LoRAEntry).lora.name, dict(runtime.modules)
    for host, names in parameters_of(runtime.recipe).items():
        for name in names:
            weight = weight_named(runtime.recipe, host, name)
            shape = runtime.recipe.params[weight].shape
            low, high = (whole([f"{host}.lora_{part}.{adapter}.{name}.weight"], _as_it_is) for part in "AB")
            how = OfParameter.read(modules[host], shape, modules[host].scales[name])
            found[weight] = functools.partial(merge_parameter_, low, high, how)
    return found


def _out_dim(layer: Any) -> int:
    """The dim of a layer's weight along which B's rows lie: a weight of an embedding is ``[tokens, width]``."""
    return 1 if isinstance(layer, AdaptedEmbedding) else layer.adapter.out_dim


def _refuse_own_forward(layer: Any, name: str) -> None:
    """Refuses to merge into the weight of a linear layer whose own forward computes something else with it: found by running it on another
    weight, in place of what this rank has a part of."""
    if not isinstance(layer, AdaptedAround):
        return
    copied = object.__new__(type(layer))  # without the hooks and shards of the module's own
    weight = torch.linspace(-1, 2, 15).view(3, 5)
    bias = None if getattr(layer, "bias", None) is None else torch.linspace(1, 3, 3)
    copied.__dict__.update(layer.__dict__, _parameters={"weight": weight, "bias": bias})
    is_linear = True
    try:
        for shape, size in itertools.product(((5,), (2, 5), (3, 2, 5), (2, 1, 3, 5)), (1e-3, 1.0, 1e4)):
            for training in (False, True):
                copied.__dict__["training"] = training
                x = size * torch.linspace(1, -2, math.prod(shape)).view(shape)
                with torch.no_grad():
                    y = super(Adapted, copied).forward(x)  # type: ignore[misc]
                is_linear &= torch.allclose(y, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-6 * size)
    except Exception:  # of code that is not known here: it asks for other shapes, or for what is not there
        is_linear = False
    if not is_linear:
        raise UnsupportedError(
            f"adapters merged into a {type(layer).__name__}",
            why="its class has a forward of its own, which computes something else than W x + bias: what is merged into W would be changed by it",
            fix="write the base alone, save_weights(model, dest, merge=False), and the adapters beside it: save_adapter(model, folder)",
            name=name,
        )


def _refuse_tie(runtime: Any, weight: str, low: str) -> None:
    """Refuses to merge into a weight that another module has too, which has no adapter there."""
    modules = dict(runtime.modules)
    if weight not in runtime.recipe.params:  # a tied weight is not packed
        return
    names = (weight, *runtime.recipe.params[weight].aliases)
    if len({id(modules[name.rpartition(".")[0]]) for name in names}) > 1:
        raise UnsupportedError(
            f"adapters merged into a weight that is also {', '.join(name for name in names if name != weight)}",
            why=f"the names are tied to one tensor, and the adapter ({low}) is beside one of them: merged, it would change the other too",
            fix="write the base alone, save_weights(model, dest, merge=False), and the adapters beside it: save_adapter(model, folder)",
            name=weight,
        )


def _task_of(model: nn.Module, recipe: Recipe) -> str | None:
    """PEFT's word for what a model computes, if it is one of transformers that predicts the next token."""
    if not is_pretrained(model):
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = user_class(model).__name__
    return "CAUSAL_LM" if {name, recipe.module_class} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()} else None


def _factor(weight: Tensor, low: Tensor, high: Tensor, magnitude: Tensor, how: Adapter) -> Tensor:
    norms = row_norms(weight, low, high, how)
    return magnitude.to(norms.dtype) / norms


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _merge(
    low: Tensor, high: Tensor, factor: Tensor | None, how: Adapter, pieces: Iterable[tuple[tuple[slice, ...], Tensor]]
) -> None:
    """Merges an adapter into pieces of its weight. The product is made in full on every rank, and cut: the bits of a part's own product
    may be others."""
    change = change_of(low, high, how)
    for index, part in pieces:
        merge_(part, index, change, factor, how)
