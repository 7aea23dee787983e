"""Weights with a row for each token: embeddings, and the heads that make logits. Any linear layer can be cut along its
outputs if these are gathered, and any embedding along its rows if those are summed. It needs no proof but that nothing
else reads the weight. So what is looked for here is where that pays: the vocabulary."""

from collections.abc import Container, Iterable, Mapping

from torch import nn

from shardwise.model.layers import Further, Layer
from shardwise.model.names import canonical_modules, canonical_tensors
from shardwise.model.trial import Trial, Uses
from shardwise.techniques.tp.search.layer_functions import parts_differ
from shardwise.techniques.tp.search.region_records import Found, Table


def add_tables(
    module: nn.Module, trial: Trial, uses: Uses, degree: int, found: Found, allowed: Container[str] | None
) -> None:
    """Adds to ``found`` the weights of heads, and of the embeddings of as many tokens, that ``degree`` ranks can share; of
    a head that they cannot, the reason.

    Args:
        module: any module.
        trial: of the whole of it, which has run in eval mode and in training mode.
        uses: what it has called.
        degree: how many ranks share a layer.
        found: the regions.
        allowed: weights of the layers that may be cut; None: all.
    """
    kinds = {weight: set().union(*by.values()) for weight, by in uses.items()}
    for weight in of_vocabulary(module, kinds, found.shown):
        shape = module.get_parameter(weight).shape
        if allowed is not None and weight not in allowed:
            found.left[weight] = "the plan does not cut it"
            continue
        result = _table(module, trial, uses[weight], weight, shape, degree)
        if isinstance(result, Table):
            found.tables.append(result)
            found.left.pop(weight, None)
        else:
            found.left[weight] = result


def of_vocabulary(module: nn.Module, uses: Mapping[str, Iterable[Layer]], shown: Container[str]) -> list[str]:
    """The weights of layers that make the output of a model with a number for each row of an embedding; and of the
    embeddings.

    Args:
        module: any module.
        uses: weight -> the layers that it is.
        shown: layers whose outputs reach the output of the model.
    """
    shapes = {name: owner._parameters[attr].shape for name, owner, attr in canonical_tensors(module, "_parameters")}  # type: ignore[union-attr]
    known = {weight: of for weight, of in uses.items() if weight in shapes}
    looked_up = {weight for weight, of in known.items() if any(use.is_embedding for use in of)}
    made = {
        (weight, shapes[weight][use.out_dim])
        for weight, of in known.items()
        for use in of
        if weight in shown and not use.is_embedding
    }
    rows = {shapes[weight][0] for weight in looked_up}
    heads, tokens = {weight for weight, size in made if size in rows}, {size for _, size in made}
    return [name for name in known if name in heads or (name in looked_up and shapes[name][0] in tokens)]


def _table(
    module: nn.Module,
    trial: Trial,
    uses: dict[str, set[Layer]],
    weight: str,
    size: tuple[int, ...],
    degree: int,
) -> Table | str:
    """How a weight is cut by tokens, or why it is not."""
    embeddings: dict[str, int | None] = {}
    heads: list[str] = []
    dims, biases, further = set[int](), set[str | None](), dict[Further, None]()
    owners = {name: set(map(id, owner._parameters.values())) for name, owner in canonical_modules(module)}
    tensor = next(
        owner._parameters[attr] for name, owner, attr in canonical_tensors(module, "_parameters") if name == weight
    )
    for caller, layers in uses.items():
        if len(layers) > 1 or id(tensor) not in owners.get(caller, ()):
            return f"{caller or 'the model'} uses it beside what it is of its own module"
        (layer,) = layers
        if layer.function is not None and layer.function[1].packing is not None:
            return "it is in 4 bits"
        if differ := parts_differ(layer, degree):
            return differ
        if layer.has_options:
            return "rows are looked up with a largest norm, or another option"
        dims.add(0 if layer.is_embedding else layer.out_dim)
        if layer.is_embedding:
            embeddings[caller] = layer.padding_idx
        else:
            heads.append(caller)
            biases.add(layer.bias)
            further |= dict.fromkeys(layer.further)
    if len(dims) > 1 or len(biases) > 1:
        return "it is the weight of layers of two kinds"
    (dim,), bias = dims, next(iter(biases), None)
    if weight in trial.read:
        return f"its weight is also used by {trial.foreign.get(weight, 'code that is no layer')}"
    if measured := trial.measured & {weight, bias}:
        return f"the code reads the shape of {min(measured)}, which would be that of a part"
    of_bias = [name for name, kinds in trial.uses.items() if any(bias and use.bias == bias for use in kinds)]
    if bias in trial.read or len(of_bias) > 1:
        return f"{bias} is used outside of its layer too"
    if (degree - 1) * -(-size[dim] // degree) >= size[dim]:
        return f"it has {size[dim]} rows, too few for {degree} ranks"
    return Table(weight, dim, bias, embeddings, tuple(heads), tuple(further))
