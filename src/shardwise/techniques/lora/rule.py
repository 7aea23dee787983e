"""Adds to the recipe which layers have an adapter, and what is trained."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shardwise.recipe import Draft, Recipe
from shardwise.recipe.records import Record
from shardwise.techniques.lora.options import ALL_LINEAR, LoRA
from shardwise.techniques.lora.peft_parameters import is_attention


class LoRAEntry(Record, frozen=True):
    """The recipe's data about adapters.

    Attributes:
        layers: names of the layers with an adapter.
        option: the option, as JSON: all ranks must have the same.
        adopted: the module's user has given it adapters by PEFT.
        unsaved: why these cannot be saved as adapters; "": they can.
        as_they_are: layer of PEFT that is computed as PEFT does -> why.
        scale: of the product, the mean over layers.
        scales: layer, or parameter -> its own, where they differ.
    """

    layers: tuple[str, ...] = ()
    option: dict[str, Any] = msgspec.field(default_factory=dict)
    adopted: bool = False
    unsaved: str = ""
    as_they_are: dict[str, str] = msgspec.field(default_factory=dict)
    scale: float = 0.0
    scales: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def lora(self) -> LoRA:
        return msgspec.convert(self.option, LoRA)


def rule(draft: Draft, facts: Mapping[str, Any], *, lora: LoRA | None) -> None:
    """Notes the adapters of the draft's module, which ``prepare`` has put there."""
    if lora is not None:
        layers = draft.anatomy.adapted
        units = units_of(layers, _stacks(draft.anatomy.params, layers))
        lora = lora.settled({name: draft.anatomy.class_paths.get(name, "") for name in units})
        scales = {name: lora.scale_of(name) for name in units}
        draft.entries["lora"] = LoRAEntry(
            layers=layers,
            option=msgspec.to_builtins(lora),
            scale=sum(scales.values()) / len(scales),
            scales=scales if len({*scales.values()}) > 1 else {},
        )
        if left := _stacks_left(draft, lora):
            names = tuple(dict.fromkeys(name.rpartition(".")[2] for name in left))
            text = f"{left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else "")
            draft.note(
                "lora",
                f"{text}, weights in no layer, are frozen and have no adapter: LoRA(experts={names!r}) gives them one",
                option="lora",
            )
    elif "adopted" in facts:
        draft.entries["lora"] = msgspec.convert({"layers": draft.anatomy.adapted, **facts["adopted"]}, LoRAEntry)
        for name, why in facts["adopted"]["as_they_are"].items():
            draft.note(
                name, f"computed as PEFT does: {why}. Under tp each of its factors is a layer of its own", option="lora"
            )
    if why := facts.get("unchecked"):
        draft.note(
            "lora",
            f"whether code reads the weights past their layers, and so passes over the adapters, was not checked: {why}. example=batch lets it be",
            option="lora",
            warns=True,
        )


def _stacks_left(draft: Draft, lora: LoRA) -> list[str]:
    """Parameters without an adapter that are matrices of experts, by their shape and module, or of torch's attention, where all linear layers
    were asked for."""
    if lora.targets != ALL_LINEAR or lora.experts:
        return []
    owner = draft.anatomy.class_paths.get
    return [
        name
        for name, fact in draft.anatomy.params.items()
        if not fact.trainable
        and (
            (
                len(fact.shape) == 3
                and min(fact.shape) > 1
                and not owner(name.rpartition(".")[0], "").startswith("torch.nn.")
            )
            or name.endswith(".in_proj_weight")
        )
    ]


def lines(recipe: Recipe) -> list[str]:
    if "lora" not in recipe.techniques:
        return []
    entry = recipe.entry("lora", LoRAEntry)
    if not entry.layers:
        return []
    lora = entry.lora
    sizes = {name: param.numbers for name, param in recipe.params.items()}
    trained = sum(sizes[name] for name, param in recipe.params.items() if param.trainable)
    kind = "DoRA" if lora.dora else "rsLoRA" if lora.rslora else "LoRA"
    beside, stacks = sum(1 for name in trained_beside(recipe)), parameters_of(recipe)
    places = [(len(entry.layers) - len(stacks), "layers"), (sum(map(len, stacks.values())), "parameters")]
    ranks = {lora.rank_of(name) for name in units_of(entry.layers, stacks)}
    return [
        f"{kind}{' of PEFT' if entry.adopted else ''}: rank {_span(ranks)}, scale {_span(entry.scales.values() or [entry.scale])}, beside {' and '.join(f'{num} {what}' for num, what in places if num)}"
        + (f", and {beside} parameters in full" if beside else "")
        + f": {trained:,} of {sum(sizes.values()):,} numbers ({trained / max(sum(sizes.values()), 1):.2%}) are trained"
    ]


def _span(values: Iterable[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def own_names(recipe: Recipe) -> list[str]:
    if "lora" not in recipe.techniques:
        return []
    return _own_names(recipe.params, recipe.entry("lora", LoRAEntry).layers)


def _own_names(names: Iterable[str], layers: Iterable[str]) -> list[str]:
    layers = {*layers}
    return [name for name in names if (place := name.rfind(".lora_")) > 0 and name[:place] in layers]


def parameters_of(recipe: Recipe) -> dict[str, list[str]]:
    """Module -> those of its parameters that have an adapter, in PEFT's order."""
    return _stacks(recipe.params, recipe.entry("lora", LoRAEntry).layers if "lora" in recipe.techniques else ())


def units_of(layers: Iterable[str], stacks: Mapping[str, Sequence[str]]) -> list[str]:
    """What has a rank and a scale of its own, by name: layers, and parameters; nn.MultiheadAttention is one."""
    units = [name for name in layers if name not in stacks or is_attention(stacks[name])]
    return units + [f"{host}.{name}" for host, of in stacks.items() if not is_attention(of) for name in of]


def _stacks(names: Iterable[str], layers: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in _own_names(names, layers):
        host, _, rest = name.rpartition(".lora_A.")
        _, *param, _ = rest.split(".")  # NAME.weight, or NAME.PARAMETER.weight
        if host and param:
            found.setdefault(host, []).extend(param)
    return found


def weight_named(recipe: Recipe, host: str, name: str) -> str:
    """The parameter that an adapter's name means in a module: one of its own, or the weight of a child."""
    own = f"{host}.{name}"
    return own if own in recipe.params else f"{own}.weight"


def trained_beside(recipe: Recipe) -> list[str]:
    """The parameters that are trained in full beside the adapters."""
    own = set(own_names(recipe))
    return [name for name, param in recipe.params.items() if param.trainable and name not in own]
