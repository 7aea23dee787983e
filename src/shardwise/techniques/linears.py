"""The linear layers of a module that options of techniques mean, by the last parts of names, or all but heads and routers of experts."""

import difflib
import itertools
from collections.abc import Iterable, Mapping

from torch import nn

from shardwise.errors import PlanError
from shardwise.model import user_class
from shardwise.model.adapted import out_dim_of
from shardwise.model.names import canonical_tensors
from shardwise.recipe.patterns import names_meant


def left_out(module: nn.Module, modules: Mapping[str, nn.Module], linear: Mapping[str, nn.Module]) -> dict[str, str]:
    """The linear layers that "all-linear" does not mean -> why: heads, and routers of experts."""
    left = {}
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
    tables = [child for child in modules.values() if isinstance(child, nn.Embedding)]
    rows, weights = {table.num_embeddings for table in tables}, {id(table.weight) for table in tables}
    for name, layer in linear.items():
        outer = modules.get(name.rpartition(".")[0])
        experts = getattr(outer, "experts", None)
        num_experts = len(experts) if isinstance(experts, nn.ModuleList) else getattr(experts, "num_experts", None)
        num_outputs = layer.weight.shape[out_dim_of(layer) or 0]  # type: ignore[union-attr, index]
        in_block = "." in name and any(part.isdigit() for part in name.split("."))
        if layer is head or id(layer.weight) in weights or (num_outputs in rows and not in_block):
            left[name] = "makes the numbers of tokens"
        elif num_experts is not None and num_outputs == num_experts:
            left[name] = "chooses experts"
    return left


def names_matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that a pattern means (:func:`~shardwise.recipe.patterns.names_meant`); classes too, if ``names`` is a mapping to modules."""
    return names_meant(classes_of(names) if isinstance(names, Mapping) else dict.fromkeys(names, ""), pattern)


def classes_of(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name -> the user's class with its package; "" of the root."""
    kinds = {name: user_class(each) for name, each in modules.items() if name}
    found = {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items()}
    return {name: found.get(name, "") for name in modules}


def matches_nothing(
    record: str,
    key: str,
    pattern: str,
    names: Iterable[str],
    others: list[str],
    usable: Mapping[str, object],
    parameters: Iterable[str] = (),
    instead: str = "",
) -> PlanError:
    """The error for a pattern in an option that means no layer.

    Args:
        record, key: the option.
        pattern: of a name.
        names: that it was compared with.
        others: names that it matches, of what the option cannot mean.
        usable: names that it can.
        parameters: names of those in no layer.
        instead: what to do for them, with ``{names}``.
    """
    parameters = [*parameters]
    inside = [name for name in parameters if name.rpartition(".")[0] in others]
    if found := names_matching(parameters, pattern) or inside:
        return PlanError(
            f"{record}({key}=({pattern!r},))",
            why=f"it means {found[0]}, a parameter that the code of its module multiplies by, and no layer",
            fix=instead.format(names=tuple(dict.fromkeys(name.rpartition(".")[2] for name in found))),
            name=found[0],
        )
    last = sorted({name.rpartition(".")[2] for name in usable})
    close = difflib.get_close_matches(pattern.rpartition(".")[2], last, n=2, cutoff=0.5)
    return PlanError(
        f"{record}({key}=({pattern!r},))",
        why=f"it means {others[0]}, which is no linear layer and no embedding"
        if others
        else "it means no layer of this model",
        fix=(f"did you mean {' or '.join(map(repr, close))}? " if close else "")
        + f"linear layers are called {', '.join(last[:12])}",
        name=others[0] if others else None,
    )


def in_no_layer(module: nn.Module) -> list[str]:
    """The parameters of two and three dims that are not of a linear layer or an embedding."""
    owners = {name: owner for name, owner, _ in canonical_tensors(module, "_parameters")}
    return [
        name
        for name, owner in owners.items()
        if module.get_parameter(name).dim() in (2, 3)
        and out_dim_of(owner) is None
        and not isinstance(owner, nn.Embedding)
    ]


def without_fast_paths(module: nn.Module, over: type) -> None:
    """Lets encoders of torch with layers of class ``over`` call them in eval mode too, on plain tensors: they would compute a block by one
    function of all its weights, which passes over what a technique has put into the layers."""
    switches = {
        nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
        nn.TransformerEncoder: ("use_nested_tensor", False),
    }
    for child, (kind, switch) in itertools.product(module.modules(), switches.items()):
        if isinstance(child, kind) and any(isinstance(part, over) for part in child.modules()):
            setattr(child, *switch)
