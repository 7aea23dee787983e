"""Adapters in PEFT's files that are read: the option, and the tensors by the names of the model. Torch-free."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import CheckpointError
from shardwise.recipe.patterns import by_name
from shardwise.techniques.lora import peft_parameters
from shardwise.techniques.lora.peft_tensors import (
    CONFIG,
    PREFIX,
    config_in,
    current_key,
    layers_in,
    refuse,
    refuse_unknown,
    shapes_in,
)

if TYPE_CHECKING:
    from shardwise.techniques.lora.options import LoRA


def option_in(folder: Path) -> dict[str, Any]:
    """The fields of the option of the adapters in a directory.

    Raises:
        CheckpointError: it cannot be read, or its tensors are not those of adapters.
        UnsupportedError: it has what is not supported here.
    """
    config = config_in(folder)
    refuse_unknown(folder, config)
    found, beside = layers_in(folder, shapes_in(folder))
    layers, stacks = peft_parameters.split(config, found)
    attention = tuple(f"{name}{peft_parameters.OF_ATTENTION}" for name in layers)
    # Every file of PEFT has that word, and ours have not.
    if "auto_mapping" in config and not found.keys().isdisjoint(attention):
        refuse(folder, "adapters of nn.MultiheadAttention, by PEFT", peft_parameters.TWICE)
    units = _units(folder, config, layers, stacks)
    ranks, alphas = {name: rank for name, (rank, _) in units.items()}, {name: of for name, (_, of) in units.items()}
    rank = config.get("r", 8) if config.get("r", 8) in ranks.values() else next(iter(ranks.values()))
    alpha = (
        config.get("lora_alpha", 8) if config.get("lora_alpha", 8) in alphas.values() else next(iter(alphas.values()))
    )
    has_vectors = {"lora_magnitude_vector" in shapes for shapes in found.values()}
    if has_vectors != {bool(config.get("use_dora"))}:
        raise CheckpointError(
            f"{folder}: use_dora={bool(config.get('use_dora'))}",
            why=f"{'some of' if len(has_vectors) > 1 else 'all'} its layers are otherwise, by their lora_magnitude_vector",
            fix="take the two files of one adapter",
        )
    return {
        "rank": rank,
        "alpha": float(alpha),
        "ranks": by_name(ranks, rank),
        "alphas": by_name(alphas, alpha),
        "targets": tuple(name for name in layers if name not in attention),
        "experts": tuple(config["target_parameters"]) if stacks else (),
        "dropout": float(config.get("lora_dropout") or 0.0),
        "rslora": bool(config.get("use_rslora")),
        "dora": bool(config.get("use_dora")),
        "train": tuple(dict.fromkeys(name.rpartition(".")[0] for name in beside)),
    }


def _units(
    folder: Path,
    config: Mapping[str, Any],
    layers: Mapping[str, peft_parameters.Parts],
    stacks: Mapping[str, Sequence[peft_parameters.Parts]],
) -> dict[str, tuple[int, float]]:
    """Layer, or parameter -> the rank and the alpha of its adapter, by name. Of a layer the file says the rank; the factors of parameters
    are those of all experts."""

    def said(key: str, patterns: str, name: str) -> Any:
        values = config.get(patterns) or {}
        try:
            own = next((value for text, value in values.items() if re.match(rf"(.*\.)?({text})$", name)), None)
            found = config.get(key, 8) if own is None else own
        except (re.error, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{folder / CONFIG}: {patterns}={values!r:.120}", why=f"{error}", fix="let it be written again"
            ) from error
        if isinstance(found, bool) or not isinstance(found, int if key == "r" else int | float) or not found > 0:
            raise CheckpointError(
                f"{folder / CONFIG}: {key} {found!r:.60}",
                why="it is no positive number",
                fix="let it be written again",
                name=name,
            )
        return found

    found = {
        name.removesuffix(peft_parameters.OF_ATTENTION): (
            parts["lora_A"][0],
            said("lora_alpha", "alpha_pattern", name.removesuffix(peft_parameters.OF_ATTENTION)),
        )
        for name, parts in layers.items()
    }
    for host, parts_of in stacks.items():
        texts = config["target_parameters"]
        own = {f"{host}.{text.rpartition('.')[2]}" for text in texts}
        # A text of one part may mean a parameter of any module: where those that name the module are enough, it means none of this one.
        named = peft_parameters.meant([text for text in texts if "." in text], own)
        for name in sorted(named if len(named) == len(parts_of) else peft_parameters.meant(texts, own)):
            found[name] = said("r", "rank_pattern", name), said("lora_alpha", "alpha_pattern", name)
    return found


@dataclass(frozen=True)
class AdapterFolder:
    """What a directory of adapters has, by the names of the model.

    Attributes:
        option: values of a :class:`LoRA`.
        layers: layer -> part (``lora_A``, ``lora_B``, ``lora_magnitude_vector``) -> its key in the file.
        tables: those of the layers that are embeddings.
        stacks: module -> as of a layer, of each of its parameters with an adapter, in the module's order.
        parameters: PEFT's names of these.
        beside: name of a tensor that was trained in full -> its key.
        fan_in_fan_out: weights are ``[in, out]``.
    """

    option: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, str]]
    tables: Collection[str]
    stacks: Mapping[str, Sequence[Mapping[str, str]]]
    parameters: Sequence[str]
    beside: Mapping[str, str]
    fan_in_fan_out: bool


def adapter_folder(folder: Path) -> AdapterFolder:
    option, shapes = option_in(folder), shapes_in(folder)
    found, beside = layers_in(folder, shapes)
    layers, stacks = peft_parameters.split(config_in(folder), found)
    tables = {name for name in layers if f"{PREFIX}{name}.lora_embedding_A" in shapes}

    def key_of(layer: str, part: str) -> str:
        part = part.replace("lora_", "lora_embedding_") if layer in tables else part
        return next(key for key in (f"{PREFIX}{layer}.{part}{end}" for end in (".weight", "")) if key in shapes)

    keys = {layer: {part: key_of(layer, part) for part in parts} for layer, parts in layers.items()}
    fan = bool(config_in(folder).get("fan_in_fan_out"))
    of_stacks = {
        host: [
            {part: f"{PREFIX}{host}{peft_parameters.INNER * depth}.{part}.weight" for part in each}
            for depth, each in ranked
        ]
        for host, each in stacks.items()
        for ranked in [list(zip(range(len(each) - 1, -1, -1), each, strict=True))]
    }
    return AdapterFolder(
        option, keys, tables, of_stacks, option["experts"], {name: PREFIX + name for name in beside}, fan
    )


def refuse_other(
    folder: Path,
    lora: "LoRA",
    units: Mapping[str, tuple[int, float]],
    keys: Mapping[str, str],
    beside: Collection[str],
    stacks: Mapping[str, Sequence[str]],
    names: Collection[str],
    prefix: str,
) -> None:
    """Refuses adapters of another kind or of other layers than a model's."""
    there, config = option_in(folder), config_in(folder)
    of_theirs = _units(folder, config, *peft_parameters.split(config, layers_in(folder, shapes_in(folder))[0]))
    weights = {f"{unit}.weight": unit for unit in units}  # of layers, which PEFT may have adapted as parameters
    of_theirs = {weights.get(name, name): found for name, found in of_theirs.items()}
    differing = [
        (what, there[what], own, None)
        for what, own in (("rslora", lora.rslora), ("dora", lora.dora))
        if there[what] != own
    ]
    differing += [
        (what, of_theirs[name][place], own[place], prefix + name)
        for place, what in enumerate(("rank", "alpha"))
        for name, own in units.items()
        if name in of_theirs and of_theirs[name][place] != own[place]
    ]
    for what, theirs, own, name in differing:
        raise CheckpointError(
            f"{folder}: adapters with {what}={theirs}",
            why=f"the model was made with {what}={own}",
            fix=f"make it with theirs: parallelize(..., lora=sw.LoRA.of({str(folder)!r}))",
            name=name,
        )
    found = {current_key(key) for key in shapes_in(folder) if key not in beside}
    peft_parameters.refuse_others(folder, there["experts"], stacks, {*names} - weights.keys())
    lacks, strange = [key for key in keys if key not in found], sorted(found - keys.keys())
    there_as = {keys[name]: name for name in found & keys.keys()}
    if lacks and not strange and all(keys[key] in there_as for key in lacks):
        raise CheckpointError(
            f"{folder}: {there_as[keys[lacks[0]]]} without {lacks[0]}",
            why="the model ties these names to one tensor, and PEFT trained one of them apart from the other",
            fix="build the model without that tie, tie_word_embeddings=False in its configuration; PEFT keeps it with "
            "LoraConfig(ensure_weight_tying=True)",
            name=keys[lacks[0]],
        )
    if lacks or strange:
        texts = [f"{len(lacks)} of the model's {len(keys)} tensors are not there: {_some(lacks)}"] if lacks else []
        texts += [f"{len(strange)} are not the model's: {_some(strange)}"] if strange else []
        raise CheckpointError(
            f"adapters from {folder}",
            why="; ".join(texts),
            fix=f"make the model with the layers of theirs: parallelize(..., lora=sw.LoRA.of({str(folder)!r}))",
            name=keys[lacks[0]] if lacks else strange[0],
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
