"""Adapters in PEFT's files: ``adapter_config.json``, and the names in ``adapter_model.safetensors``. Torch-free."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import UnsupportedError
from shardwise.recipe.patterns import by_name
from shardwise.techniques.lora import peft_parameters
from shardwise.techniques.lora.peft_folder import refuse_other
from shardwise.techniques.lora.peft_tensors import PREFIX
from shardwise.techniques.technique import AdapterFiles

if TYPE_CHECKING:
    from shardwise.techniques.lora.options import LoRA
    from shardwise.techniques.lora.rule import LoRAEntry


_OF_PEFT = (
    "base_layer", "lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
)  # fmt: skip
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


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
    owners = _owners_of(trained, stored, prefix, entry.layers)
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
        **_config_of(lora, units),
        "ensure_weight_tying": any(stored[name] for name in trained),
        "fan_in_fan_out": is_turned,
        "modules_to_save": _short(owners, [*inside, *of_peft], whole_parts=False) or None,
        "target_modules": _targets(layers, inside),
        "target_parameters": peft_parameters.targets_of(stacks, names) or None,
        "task_type": task,
    }
    beside = {
        f"{PREFIX}{name.removeprefix(prefix)}.base_layer.weight": homes[f"{name}.weight"]
        for name in entry.layers
        if f"{name}.weight" in homes
    }
    check = functools.partial(
        refuse_other, lora=lora, units=units, keys=keys, beside=beside, stacks=stacks, names=names, prefix=prefix
    )
    notes = (peft_parameters.note_of_attention(attention), _note(layers, stored))
    return AdapterFiles(keys, config, check, beside, "; ".join(filter(None, notes)))


def _owners_of(
    trained: Sequence[str], stored: Mapping[str, Sequence[str]], prefix: str, layers: Sequence[str]
) -> dict[str, None]:
    """The modules, within the model, of which parameters are trained in full: PEFT stores these as a whole."""
    owners: dict[str, None] = {}
    for name in trained:
        for each in (name, *stored[name]):
            owner = each.rpartition(".")[0]
            _refuse_owner(owner, each, prefix, layers)
            owners[owner.removeprefix(prefix)] = None
    return owners


def _config_of(lora: "LoRA", units: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """What ``adapter_config.json`` says of the option, and of the rank and alpha of each layer or parameter."""
    return {
        "alpha_pattern": _patterns({unit: _number(alpha) for unit, (_, alpha) in units.items()}, lora.alpha_used),
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _number(lora.alpha_used),
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": _patterns({unit: rank for unit, (rank, _) in units.items()}, lora.rank),
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    }


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
