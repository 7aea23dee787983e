"""Whether other code than a layer's own forward reads the weight that an adapter is beside: it would pass over the adapter."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError, UnsupportedError, UsageError, first_line
from shardwise.model.adapted import AdaptedLinear, adapted_layers
from shardwise.model.adapted_parameters import AdaptedParameters, adapted_weight, factors_of
from shardwise.model.adopted import OF_PARAMETER, not_adopted, option_of, weight_name
from shardwise.model.names import canonical_modules
from shardwise.model.peft_names import inner_of_peft
from shardwise.model.trial import Trial
from shardwise.recipe import Draft
from shardwise.recipe.patterns import by_name
from shardwise.techniques.lora.options import LoRA
from shardwise.techniques.lora.peft_tensors import INITS
from shardwise.techniques.one_rank import found_by_one_rank
from shardwise.techniques.technique import Example
from shardwise.world import World


def probe(module: nn.Module, example: Example, draft: Draft, world: World, *, lora: LoRA | None) -> dict[str, Any]:
    """Runs a copy of ``module`` on the example, without its linear layers, in eval mode and in training.

    Returns:
        ``unchecked``: why it could not be run; nothing if it was.

    Raises:
        UnsupportedError: a weight that is read past its layer, by name.
    """
    adopted = _adopted(module) if lora is None else {}
    _refuse_parameters(adopted, draft)
    if not adapted_layers(module):
        return adopted
    find = functools.partial(_found, module, example, draft)
    readers, unchecked = found_by_one_rank(world, example, "the search for what passes over adapters", find)
    if readers:
        parameters = readers.keys() & draft.anatomy.params.keys()
        names = tuple(dict.fromkeys(name.rpartition(".")[2] for name in readers))
        name, function = next(iter(readers.items()))
        raise UnsupportedError(
            f"an adapter of a weight that {function} reads outside of its module's forward"
            if name in parameters
            else f"an adapter beside a weight that {function} reads past its layer",
            why="what reads the weight there does not call the layer, so that its adapter would have no part in it, without an error"
            + (f"; so it is with {len(readers) - 1} more" if len(readers) > 1 else ""),
            fix=f"leave {', '.join(names)} out of LoRA(experts=...)"
            if name in parameters
            else f"leave these layers out: {'LoRAConfig(exclude_modules' if adopted else 'LoRA(exclude'}={names!r})",
            name=name,
        )
    return {**adopted, "unchecked": unchecked} if unchecked else adopted


def _refuse_parameters(adopted: Mapping[str, Any], draft: Draft) -> None:
    """Refuses adapters of parameters by PEFT where these are cut: each forward writes ``W + s B A`` in place of the parameter."""
    others = adopted.get("adopted", {}).get("as_they_are", {})
    name = next((name for name, why in others.items() if why == OF_PARAMETER), None)
    if name is None or draft.layout.degree("fsdp") == 1:
        return
    raise UnsupportedError(
        f"adapters of parameters by PEFT (target_parameters) under {draft.layout}",
        why="PEFT puts what it makes of W and its adapter in the parameter's place in each forward, where FSDP2 keeps a rank's shard of it",
        fix="give the model without adapters, and lora=sw.LoRA(experts=(...)), whose numbers and files are PEFT's, under every layout",
        name=name,
    )


def _adopted(module: nn.Module) -> dict[str, Any]:
    """What the recipe says of adapters that PEFT has put into a module; {}: there are none."""
    layers, others = adapted_layers(module), not_adopted(module)
    if not layers and not others:
        return {}
    options = [option_of(layer) for layer in layers.values()]
    option, unsaved = {**options[0]} if options else {}, ""
    for key in ("rank", "alpha") if options else ():
        own = {name: each[key] for name, each in zip(layers, options, strict=True)}
        option[f"{key}s"] = by_name(own, option[key])
    differing = [key for key in ("dropout", "rslora", "dora", "name") if len({each[key] for each in options}) > 1]
    if differing:
        unsaved = f"layers have another {' and '.join(differing)} each"
    for each, layer in zip(options, layers.values(), strict=True):
        if abs(LoRA(**each).scale - layer.adapter.scale) > 1e-9 * layer.adapter.scale:
            unsaved = f"their scale is {layer.adapter.scale:g}, which lora_alpha={each['alpha']:g} does not give"
    for _, child in canonical_modules(module):
        configs: Any = getattr(child, "peft_config", {}) if inner_of_peft(child) else {}
        for config in configs.values():
            if (init := getattr(config, "init_lora_weights", True)) not in INITS:
                unsaved = f"init_lora_weights={init!r} has changed the base, which is not in PEFT's files"
    scales = {name: layer.adapter.scale for name, layer in layers.items()}
    return {
        "adopted": {
            "option": option,
            "adopted": True,
            "unsaved": unsaved,
            "as_they_are": others,
            "scale": sum(scales.values()) / max(len(scales), 1),
            "scales": scales if len({*scales.values()}) > 1 else {},
        }
    }


def _found(module: nn.Module, example: Example, draft: Draft) -> tuple[dict[str, str], str]:
    """Layer -> the function that reads its weight; and why the module was not run."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return example.shows(functools.partial(_readers, module, draft)), ""
    except (UsageError, UnsupportedError) as error:
        return {}, error.why


def _readers(module: nn.Module, draft: Draft, run: Callable[[nn.Module], Any]) -> dict[str, str]:
    trial, foreign = _run(module, run)
    found: dict[str, str] = {}
    for name, layer in adapted_layers(module).items():
        if isinstance(layer, AdaptedParameters):
            found |= _readers_of_parameters(trial, name, layer)
            continue
        weight = weight_name(name, layer)
        weight = weight if weight in draft.anatomy.params else f"{weight}_nf4"
        fact = draft.anatomy.params.get(weight)
        if not isinstance(layer, AdaptedLinear) or fact is None or fact.aliases:
            continue  # a forward of its own reads the weight; a tied one is read by its other module
        if weight in foreign:
            found[name] = foreign[weight].strip("_")
        elif any(use.function is None for use in trial.uses.get(weight, ())):
            found[name] = "other code"
    return found


def _readers_of_parameters(trial: Trial, host: str, module: AdaptedParameters) -> dict[str, str]:
    """Parameter with an adapter -> a function that is given it, and not what is made of it for the forward of its module."""
    found = {}
    for each, _, _ in factors_of(module):
        name = f"{host}.{each}" if each in module._parameters else f"{host}.{each}.weight"  # type: ignore[attr-defined]
        functions = [*trial.read.get(name, ()), *(["linear"] if name in trial.uses else [])]
        if others := [function for function in functions if function != adapted_weight.__name__]:
            found[name] = others[0].strip("_")
    return found


def _run(module: nn.Module, run: Callable[[nn.Module], Any]) -> tuple[Trial, dict[str, str]]:
    """A trial that has run in eval mode and in training; and weight -> the function that has read it, which had the
    values that it needs."""
    foreign: dict[str, str] = {}
    while True:
        trial = Trial(module, run, foreign=frozenset(foreign))
        try:
            for is_training in (False, True):
                trial.set_training(is_training)
                trial.run(watch=lambda *_: None)
            return trial, foreign | trial.foreign
        except ShardwiseError:
            raise
        except Exception as error:
            if foreign == (foreign := trial.foreign | foreign):
                raise UnsupportedError(
                    f"a run of {type(module).__name__} without its linear layers",
                    why=f"{type(error).__name__}: {first_line(error)}",
                    fix="let it run on a batch as training gives it (example= of parallelize), on the CPU and in float64",
                ) from error
