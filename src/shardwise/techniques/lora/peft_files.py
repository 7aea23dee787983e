"""Adapters in PEFT's files: ``adapter_config.json``, and the names in ``adapter_model.safetensors``. Torch-free."""

import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.recipe.patterns import by_name
from shardwise.techniques.lora import peft_parameters
from shardwise.techniques.technique import AdapterFiles

if TYPE_CHECKING:
    from shardwise.techniques.lora.options import LoRA
    from shardwise.techniques.lora.rule import LoRAEntry

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."

_FACTOR = re.compile(r"(?P<layer>.+)\.(?P<part>lora_A|lora_B)\.weight")
_OF_TABLE = re.compile(r"(?P<layer>.+)\.(?P<part>lora_embedding_[AB])")
_BASE = re.compile(
    r"(?P<layer>.+)\.base_layer\.weight"
)  # which PEFT writes beside the adapter of an embedding, or of a head
_VECTOR = re.compile(r"(?P<layer>.+)\.lora_magnitude_vector(\.weight)?")
INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # those that leave the weights of the base as they are
_OF_PEFT = (
    "base_layer",
    "lora_A",
    "lora_B",
    "lora_dropout",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
)
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# Keys of a configuration that are read here, or change nothing of what an adapter computes once it has its values.
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
}  # fmt: skip


# ---- written ------------------------------------------------------------------------------------------------------


def files_of(
    entry: "LoRAEntry",
    *,
    prefix: str,
    own: Sequence[str],
    stacks: Mapping[str, Sequence[str]],
    trained: Sequence[str],
    stored: Mapping[str, Sequence[str]],
    modules: Sequence[str],
    is_turned: bool,
    task: str | None,
) -> AdapterFiles:
    """What PEFT would write for a model.

    Args:
        entry: of the recipe.
        prefix: of the names of the model within the module.
        own: canonical names of the adapters' parameters.
        stacks: module -> those of its parameters that have an adapter, in its order.
        trained: those of parameters that are trained in full.
        stored: canonical name of each parameter and persistent buffer -> its aliases.
        modules: names of all modules, aliases too.
        is_turned: weights are ``[in, out]``.
        task: PEFT's word for what the model computes; None: it has none.

    Raises:
        UnsupportedError: PEFT's files have no place for a parameter that is trained.
    """
    lora = entry.lora
    inside = [name.removeprefix(prefix) for name in modules if name.startswith(prefix)]
    attention = [name for name, params in stacks.items() if peft_parameters.is_attention(params)]
    layers = [name.removeprefix(prefix) for name in entry.layers if name not in stacks or name in attention]
    homes = {alias: name for name, aliases in stored.items() for alias in (name, *aliases)}
    owners: dict[str, None] = {}
    for name in trained:
        for each in (name, *stored[name]):
            owner = each.rpartition(".")[0]
            _refuse_owner(owner, each, prefix, entry.layers)
            owners[owner.removeprefix(prefix)] = None
    of_layers = [name for name in own if name[: name.rfind(".lora_")] not in stacks]
    keys = {PREFIX + _stored(name.removeprefix(prefix), lora.name): name for name in of_layers}
    stacks = {host.removeprefix(prefix): names for host, names in stacks.items()}
    wrapped = dict.fromkeys([*layers, *stacks])
    of_peft = [f"{layer}.{part}{end}" for layer in wrapped for part in _OF_PEFT for end in ("", f".{lora.name}")]
    _refuse_others(owners, inside, of_peft, prefix)
    names = [name.removeprefix(prefix) for name in stored if name not in {*own}]
    keys |= {PREFIX + key: prefix + name for key, name in peft_parameters.keys_of(stacks, lora.name).items()}
    stacks = {host: params for host, params in stacks.items() if prefix + host not in attention}
    keys |= {
        PREFIX + alias.removeprefix(prefix): home
        for alias, home in homes.items()
        if any(alias.startswith(f"{prefix}{owner}.") for owner in owners)
    }
    units = {
        unit: (lora.rank_of(prefix + unit), lora.alpha_of(prefix + unit))
        for unit in (*layers, *(f"{host}.{name}" for host, params in stacks.items() for name in params))
    }
    config = {
        "alpha_pattern": _patterns({unit: _number(alpha) for unit, (_, alpha) in units.items()}, lora.alpha_used),
        "base_model_name_or_path": None,
        "bias": "none",
        "ensure_weight_tying": any(stored[name] for name in trained),
        "fan_in_fan_out": is_turned,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _number(lora.alpha_used),
        "lora_dropout": lora.dropout,
        "modules_to_save": _short(owners, [*inside, *of_peft], whole_parts=False) or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": _patterns({unit: rank for unit, (rank, _) in units.items()}, lora.rank),
        "target_modules": _targets(layers, inside),
        "target_parameters": peft_parameters.targets_of(stacks, names) or None,
        "task_type": task,
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    }
    beside = {
        f"{PREFIX}{name.removeprefix(prefix)}.base_layer.weight": homes[f"{name}.weight"]
        for name in entry.layers
        if f"{name}.weight" in homes
    }
    check = functools.partial(
        _refuse_other, lora=lora, units=units, keys=keys, beside=beside, stacks=stacks, names=names, prefix=prefix
    )
    notes = (peft_parameters.note_of_attention(attention), _note(layers, stored))
    return AdapterFiles(keys, config, check, beside, "; ".join(filter(None, notes)))


def _note(layers: Iterable[str], stored: Iterable[str]) -> str:
    """PEFT 0.18 and later take names that layers of experts once had for the one parameter that these are now, whichever layers they name."""
    taken = sorted({layer.rpartition(".")[2] for layer in layers} & _OF_EXPERTS)
    stacked = next((name for name in stored if name.endswith(".experts.gate_up_proj")), None)
    if not taken or stacked is None:
        return ""
    return (
        f"adapters beside layers called {', '.join(taken)}, of a model with experts in one parameter ({stacked}): PEFT takes these names for that "
        "parameter, and leaves the layers out; sw.load_adapter reads them, and sw.save_weights writes the merged model"
    )


def _stored(name: str, adapter: str) -> str:
    """The key of an adapter's parameter, without PEFT's prefix: without the adapter's name."""
    before, _, leaf = name.rpartition(f".{adapter}")
    return before if before.endswith(".lora_magnitude_vector") else before + leaf


def _patterns(values: Mapping[str, float], otherwise: float) -> dict[str, float]:
    """Values of layers as PEFT reads them: by the end of a name, or all of them by whole ones. PEFT sorts them, and takes the first that
    matches: so no two may match one layer."""
    found = by_name(values, otherwise)
    are_whole = found.keys() == values.keys()
    return {f"^{re.escape(name)}" if are_whole else re.escape(name): value for name, value in found.items()}


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _targets(layers: Iterable[str], modules: Sequence[str]) -> list[str] | str:
    """What means these layers alone to PEFT: names, or an expression where a name is also the end of another."""
    found = _short(layers, modules, whole_parts=True)
    is_meant = _meant(found, modules, whole_parts=True) == set(layers)
    return found if is_meant else "|".join(map(re.escape, found))


def _short(names: Iterable[str], modules: Sequence[str], *, whole_parts: bool) -> list[str]:
    """The last parts of names, if these mean the same modules to PEFT; else the names."""
    names = list(names)
    last = sorted({name.rpartition(".")[2] for name in names})
    return last if _meant(last, modules, whole_parts=whole_parts) == set(names) else sorted(names)


def _meant(texts: Iterable[str], modules: Iterable[str], *, whole_parts: bool) -> set[str]:
    """The modules that PEFT takes texts for: by their last letters, and with ``whole_parts`` by their last parts."""
    ends = tuple(f".{text}" if whole_parts else text for text in texts)
    exact = set(texts)
    return {name for name in modules if name in exact or (ends and name.endswith(ends))}


def _refuse_owner(owner: str, name: str, prefix: str, layers: Sequence[str]) -> None:
    """Refuses a parameter that PEFT cannot store: it stores modules as a whole, of the model, and not with adapters within."""
    within = next((layer for layer in layers if layer == owner or layer.startswith(f"{owner}.")), None)
    why = (
        f"it is outside of {prefix.rstrip('.')}, the model that is loaded by these files"
        if not owner.startswith(prefix)
        else "it belongs to no module but the model itself, and they hold whole modules"
        if owner == prefix.rstrip(".")
        else f"they hold whole modules, and {owner} has an adapter: {within}"
        if within is not None
        else None
    )
    if why is not None:
        raise UnsupportedError(
            "a parameter that is trained in full, in PEFT's files",
            why=why,
            fix="leave it out of LoRA(train=...); or write the merged model: sw.save_weights(model, dest)",
            name=name,
        )


def _refuse_others(owners: Iterable[str], modules: Sequence[str], of_peft: Sequence[str], prefix: str) -> None:
    """Refuses names of modules that PEFT would take for others too, or for those that it puts into layers (``of_peft``)."""
    owners = list(owners)
    for name in sorted(_meant(owners, of_peft, whole_parts=False)):
        owner = next(owner for owner in owners if name.endswith(owner))
        raise UnsupportedError(
            f"{prefix}{owner}, which is trained in full, in PEFT's files",
            why=f"PEFT knows it by how its name ends, and {name}, which PEFT makes beside an adapter, ends so too",
            fix="give the module another name, such as head; or write the merged model: sw.save_weights(model, dest)",
            name=f"{prefix}{owner}",
        )
    for name in sorted(_meant(owners, modules, whole_parts=False) - set(owners)):
        if not name.startswith(tuple(f"{owner}." for owner in owners)):
            owner = next(owner for owner in owners if name.endswith(owner))
            raise UnsupportedError(
                f"{prefix}{owner}, which is trained in full, in PEFT's files",
                why=f"PEFT knows it by how its name ends, and {prefix}{name}, which is not trained, ends so too",
                fix=f"train both: LoRA(train=({owner!r}, {name!r})); or write the merged model: sw.save_weights(model, dest)",
                name=f"{prefix}{owner}",
            )


# ---- read ---------------------------------------------------------------------------------------------------------


def option_in(folder: Path) -> dict[str, Any]:
    """The fields of the option of the adapters in a directory.

    Raises:
        CheckpointError: it cannot be read, or its tensors are not those of adapters.
        UnsupportedError: it has what is not supported here.
    """
    config = _config_in(folder)
    _refuse_unknown(folder, config)
    found, beside = _layers_in(folder, _shapes_in(folder))
    layers, stacks = peft_parameters.split(config, found)
    attention = tuple(f"{name}{peft_parameters.OF_ATTENTION}" for name in layers)
    if "auto_mapping" in config and not found.keys().isdisjoint(
        attention
    ):  # which every file of PEFT has, and ours have not
        _refuse(folder, "adapters of nn.MultiheadAttention, by PEFT", peft_parameters.TWICE)
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
    """Reads what a directory of adapters has.

    Raises:
        CheckpointError, UnsupportedError: as :func:`option_in`.
    """
    option, shapes = option_in(folder), _shapes_in(folder)
    found, beside = _layers_in(folder, shapes)
    layers, stacks = peft_parameters.split(_config_in(folder), found)
    tables = {name for name in layers if f"{PREFIX}{name}.lora_embedding_A" in shapes}

    def key_of(layer: str, part: str) -> str:
        part = part.replace("lora_", "lora_embedding_") if layer in tables else part
        return next(key for key in (f"{PREFIX}{layer}.{part}{end}" for end in (".weight", "")) if key in shapes)

    keys = {layer: {part: key_of(layer, part) for part in parts} for layer, parts in layers.items()}
    fan = bool(_config_in(folder).get("fan_in_fan_out"))
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


def weights_in(folder: Path) -> Path:
    """The file with an adapter's tensors.

    Raises:
        CheckpointError: there is none.
        UnsupportedError: it is a pickle.
    """
    path = folder / WEIGHTS
    if path.is_file():
        return path
    if (folder / PICKLED).exists():
        raise UnsupportedError(
            f"{folder / PICKLED}",
            why="it is a pickle, and reading one runs the code in it",
            fix="where you trust it, let PEFT write it again as safetensors: PeftModel.from_pretrained(model, folder).save_pretrained(other)",
        )
    raise CheckpointError(
        f"adapters from {folder}",
        why=f"there is no {WEIGHTS} in it",
        fix="name a directory that sw.save_adapter, or save_pretrained of a PEFT model, has written",
    )


def _refuse_other(
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
    there, config = option_in(folder), _config_in(folder)
    of_theirs = _units(folder, config, *peft_parameters.split(config, _layers_in(folder, _shapes_in(folder))[0]))
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
    found = {_current(key) for key in _shapes_in(folder) if key not in beside}
    peft_parameters.refuse_others(folder, there["experts"], stacks, names)
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


def _current(key: str) -> str:
    """A key as PEFT writes it today."""
    return key.removesuffix(".weight") if _VECTOR.fullmatch(key) else key


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _refuse(folder: Path, what: str, why: str) -> NoReturn:
    raise UnsupportedError(
        f"{folder}: {what}",
        why=why,
        fix="merge it into its base with PEFT (merge_and_unload, then save_pretrained), and load that with sw.load_weights",
    )


def _refuse_unknown(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        _refuse(folder, f"peft_type={config.get('peft_type')}", "adapters are LORA here, with use_rslora and use_dora")
    if config.get("bias", "none") != "none":
        _refuse(folder, f"bias={config['bias']!r}", "PEFT stores these biases in a form of their own")
    if (init := config.get("init_lora_weights")) not in INITS:
        _refuse(
            folder,
            f"init_lora_weights={init!r}",
            "it has changed the weights of the base, which are not in this directory",
        )
    for key, value in config.items():
        if key not in _KNOWN and value:
            _refuse(folder, f"{key}={value!r:.60}", "that is not supported here")


def _layers_in(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, dict[str, tuple[int, ...]]], list[str]]:
    """Layer -> part of its adapter -> shape; and the names of tensors that are trained in full."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    beside = []
    for key, shape in shapes.items():
        name = key.removeprefix(PREFIX)
        if name == key:
            raise CheckpointError(
                f"{folder / WEIGHTS}: {key}",
                why=f"PEFT's names begin with {PREFIX}",
                fix="name a directory that sw.save_adapter, or save_pretrained of a PEFT model, has written",
            )
        if factor := _FACTOR.fullmatch(name):
            layers.setdefault(factor["layer"], {})[factor["part"]] = shape
        elif factor := _OF_TABLE.fullmatch(name):
            layers.setdefault(factor["layer"], {})[factor["part"].replace("embedding_", "")] = shape
        elif (base := _BASE.fullmatch(name)) and any(
            f"{PREFIX}{base['layer']}.{part}" in shapes for part in ("lora_embedding_A", "lora_A.weight")
        ):
            continue
        elif vector := _VECTOR.fullmatch(name):
            layers.setdefault(vector["layer"], {})["lora_magnitude_vector"] = shape
        elif "lora_" in name or ".base_layer." in name:
            _refuse(folder, name, "adapters are factors lora_A and lora_B here, beside linear layers and embeddings")
        else:
            beside.append(name)
    half = next((name for name, parts in layers.items() if not {"lora_A", "lora_B"} <= parts.keys()), None)
    if half is not None or not layers:
        raise CheckpointError(
            f"adapters from {folder}",
            why=f"{half} has {' and '.join(layers[half])} alone"
            if half is not None
            else "there is no lora_A and lora_B in it",
            fix="let it be saved again: a layer has lora_A and lora_B",
            name=half,
        )
    return layers, beside


def _config_in(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"adapters from {folder}",
            why=f"{CONFIG} cannot be read: {error.strerror or error}",
            fix="name a directory that sw.save_adapter, or save_pretrained of a PEFT model, has written",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}", why=f"it is not JSON: {error}", fix="let it be written again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}", why="it is no JSON object", fix="let it be written again")
    return config


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in a safetensors file, by its header alone."""
    path = weights_in(folder)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(size))
        return dict(_shapes(header))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}", why=f"it is not a complete safetensors file: {error}", fix="copy it again, or save it again"
        ) from error


def _shapes(header: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, fact in header.items():
        if name != "__metadata__":
            shape = tuple(int(n) for n in fact["shape"])
            if math.prod(shape) < 1:
                raise ValueError(f"{name} of shape {list(shape)} has no values")
            yield name, shape
