"""The parameters that ``LoRA(experts=...)`` means: those which the code of their module multiplies by, and which are in no layer."""

import difflib

from torch import nn

from shardwise.errors import PlanError, UnsupportedError
from shardwise.model.adapted import out_dim_of
from shardwise.model.blocks import has_no_forward
from shardwise.model.names import canonical_tensors
from shardwise.techniques.linears import names_matching
from shardwise.techniques.lora.options import LoRA


def chosen_parameters(module: nn.Module, lora: LoRA) -> tuple[dict[str, list[str]], list[str]]:
    """Module -> its parameters that get an adapter; and the linear layers whose weight is meant, beside which it is computed.

    Raises:
        PlanError: a name that means no parameter.
        UnsupportedError: a parameter whose adapter would have no effect, or another one.
    """
    if not lora.experts:
        return {}, []
    owners = {name: owner for name, owner, _ in canonical_tensors(module, "_parameters")}
    named, first = {name: module.get_parameter(name) for name in owners}, dict[tuple[int, str], str]()
    found: dict[str, None] = {}
    for pattern in lora.experts:
        hits = names_matching([*named], pattern)
        if not hits:
            raise _matches_nothing(pattern, named)
        found |= dict.fromkeys(hits)
    chosen, layers = dict[str, list[str]](), list[str]()
    for name in [name for name in named if name in found]:
        owner, attr = owners[name], name.rpartition(".")[2]
        if first.setdefault((id(owner), attr), name) != name:
            continue  # another name of one module
        if attr == "weight" and out_dim_of(owner) == 0:
            layers.append(name.removesuffix(".weight"))
            continue
        others = [other for other, param in named.items() if param is named[name] and owners[other] is not owner]
        if why := _why_not(name, owner, named[name], others):
            raise UnsupportedError(
                f"LoRA(experts=...) of a parameter of {type(owner).__name__}", why=why[0], fix=why[1], name=name
            )
        chosen.setdefault(name.rpartition(".")[0], []).append(attr)
    return chosen, layers


def _why_not(name: str, owner: nn.Module, param: nn.Parameter, others: list[str]) -> tuple[str, str] | None:
    """Why a parameter can have no adapter, and what to do; None: it can."""
    host = name.rpartition(".")[0]
    leave = "leave it out of experts="
    if param.dim() not in (2, 3) or not param.is_floating_point():
        return (
            f"it is {str(param.dtype).removeprefix('torch.')} of shape {list(param.shape)}: adapters are of matrices, and of stacks of them",
            leave,
        )
    if out_dim_of(owner) is not None or isinstance(owner, nn.Embedding):
        return (
            "it is the weight of a layer, whose adapter is computed beside it",
            f"name the layer: LoRA(targets=({host!r},))",
        )
    if others:
        return f"it is also {others[0]}, whose module would compute without the adapter", leave
    if ".parametrizations." in name:
        return "another weight is computed from it", leave
    if not host:
        return (
            "it belongs to no module but the model itself, for which PEFT's files have no place",
            "put it into a module of its own",
        )
    if has_no_forward(owner) or "forward" in vars(owner):
        return (
            "its module has no forward, within which the adapted weight would be read"
            if has_no_forward(owner)
            else "a forward was set on its module"
        ), "let the module that holds it compute with it, in its class's forward"
    return None


def why_not_attention(layer: nn.MultiheadAttention, lora: LoRA) -> str:
    """Why torch's attention can have no adapter of its projections; "": it can."""
    if type(layer).forward is not nn.MultiheadAttention.forward:
        return f"{type(layer).__name__} has a forward of its own"
    if not layer._qkv_same_embed_dim:
        return "its keys or values are of another width, and have projections of their own"
    if lora.dora or lora.dropout:
        return "its projections are parameters, which can have neither DoRA nor dropout"
    return ""


def _matches_nothing(pattern: str, params: dict[str, nn.Parameter]) -> PlanError:
    stacked = sorted({name.rpartition(".")[2] for name, param in params.items() if param.dim() == 3})
    leaves = sorted({name.rpartition(".")[2] for name in params})
    close = difflib.get_close_matches(pattern.rpartition(".")[2], leaves, n=2, cutoff=0.5)
    return PlanError(
        f"LoRA(experts=({pattern!r},))",
        why="it means no parameter of this model",
        fix=(f"did you mean {' or '.join(map(repr, close))}? " if close else "")
        + (
            f"parameters of three dims are called {', '.join(stacked[:12])}"
            if stacked
            else "no parameter has three dims: name layers in targets="
        ),
    )
