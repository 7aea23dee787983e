"""Adapters of parameters in PEFT's files (``target_parameters``). Torch-free.

PEFT puts a wrapper around the module for each of its parameters with an adapter, the first one innermost. A key says how many wrappers are
around that of its parameter, as ``experts.base_layer.lora_A.weight``, and not which parameter it is: the module's order does.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

INNER = ".base_layer"
OF_ATTENTION = f"{INNER}.out_proj"

TWICE = "it counts that of out_proj twice (as of its 0.21.2: https://github.com/huggingface/peft/pull/3774)"

Parts = dict[str, tuple[int, ...]]
"""``lora_A``, ``lora_B`` -> shape."""


def keys_of(stacks: Mapping[str, Sequence[str]], adapter: str) -> dict[str, str]:
    """Key without PEFT's prefix -> name in the model, of the factors of parameters. ``stacks``: module -> its parameters with an adapter."""
    return {
        f"{host}{_place(names, place)}.lora_{part}.weight": f"{host}.lora_{part}.{adapter}.{name}.weight"
        for host, names in stacks.items()
        for place, name in enumerate(names)
        for part in "AB"
    }


def _place(names: Sequence[str], place: int) -> str:
    """What stands behind the module's name in the keys of one of its parameters."""
    if is_attention(names):  # a layer of its own kind, around another one
        return OF_ATTENTION if place else ""
    return INNER * (len(names) - 1 - place)


def is_attention(names: Sequence[str]) -> bool:
    """Whether these parameters with an adapter are those of nn.MultiheadAttention, both of which PEFT adapts where it is a target."""
    return [*names] == ["in_proj_weight", "out_proj"]


def note_of_attention(modules: Sequence[str]) -> str:
    """What PEFT makes of adapters of nn.MultiheadAttention that is not meant."""
    if not modules:
        return ""
    return (
        f"adapters of {modules[0]}, which is nn.MultiheadAttention: PEFT reads them, but {TWICE}; sw.load_adapter reads them as they are, and "
        "sw.save_weights writes the merged model"
    )


def targets_of(stacks: Mapping[str, Sequence[str]], names: Collection[str]) -> list[str]:
    """The last parts of the parameters' names, if these mean the same ones to PEFT; else the names. ``names``: of all parameters."""
    own = [f"{host}.{name}" for host, params in stacks.items() for name in params]
    last = list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in own))
    return last if meant(last, names) == set(own) else own


def meant(targets: Iterable[str], names: Iterable[str]) -> set[str]:
    """The parameters that PEFT takes texts for."""
    exact, ends = {*targets}, tuple(f".{text}" for text in targets)
    return {name for name in names if name in exact or (ends and name.endswith(ends))}


def split(config: Mapping[str, Any], found: Mapping[str, Parts]) -> tuple[dict[str, Parts], dict[str, list[Parts]]]:
    """Layers with an adapter, and modules of whose parameters some have one -> these, the innermost first; by what is before ``lora_A``."""
    if not config.get("target_parameters"):
        return {**found}, {}
    inner = {name.removesuffix(INNER) for name in found if name.endswith(INNER)}
    modules = config.get("target_modules") or ()

    def is_layer(name: str) -> bool:
        if isinstance(modules, str):
            return re.fullmatch(modules, name) is not None
        return bool(meant(modules, [name]))

    layers, depths = dict[str, Parts](), dict[str, dict[int, Parts]]()
    for name, parts in found.items():
        host, depth = name, 0
        while host.endswith(INNER):
            host, depth = host.removesuffix(INNER), depth + 1
        if depth or host in inner or not is_layer(host):
            depths.setdefault(host, {})[depth] = parts
        else:
            layers[name] = parts
    return layers, {host: [by[depth] for depth in sorted(by, reverse=True)] for host, by in depths.items()}


def refuse_others(
    folder: Path, targets: Sequence[str], stacks: Mapping[str, Sequence[str]], names: Collection[str]
) -> None:
    """Refuses adapters of other parameters than a model's, which may have the keys and shapes of its own."""
    own = {f"{host}.{name}" for host, params in stacks.items() for name in params}
    there = meant(targets, names)
    if own != there:
        name = min(own ^ there)
        raise CheckpointError(
            f"{folder}: target_parameters={list(targets)}",
            why=f"{'the model has no adapter of' if name in there else 'they have none of'} {name}",
            fix=f"make the model with theirs: parallelize(..., lora=sw.LoRA.of({str(folder)!r}))",
            name=name,
        )
