"""Puts frozen weights into 4 bits, before the module is read."""

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.errors import PlanError, UnsupportedError
from shardwise.model.adapted import Adapted, Adapter, adapter_tensors, has_own_forward, out_dim_of, row_norms
from shardwise.model.names import canonical_modules
from shardwise.model.packed import PackedLinear, adopt_packed, pack_layer, packed_layers
from shardwise.techniques.linears import in_no_layer, left_out, matches_nothing, names_matching, without_fast_paths
from shardwise.techniques.quantize.options import ALL_LINEAR, Quantize
from shardwise.world import World


def prepare(
    module: nn.Module, world: World | None, device: torch.device | None, *, quantize: Quantize | None
) -> nn.Module:
    """``module``, whose chosen frozen weights are in 4 bits. Those that bitsandbytes has put into 4 bits stay so.

    Raises:
        PlanError: a name that means no layer, or nothing that could be packed.
        UnsupportedError: a layer that was named, whose weight cannot be; or a weight that is not finite.
    """
    adopt_packed(module)
    if quantize is None:
        without_fast_paths(module, PackedLinear)
        return module
    for name, layer in _chosen(module, quantize).items():
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        if not weight.is_meta and not bool(torch.isfinite(weight.float()).all()):
            raise UnsupportedError(
                "a weight with NaN or infinite numbers (in float32), in 4 bits",
                why="a block of 64 is stored relative to its largest number",
                fix="use weights of an earlier step, or keep it plain: Quantize(keep=(...))",
                name=f"{name}.weight",
            )
        pack_layer(layer)
        if isinstance(layer, Adapted):
            _, _, magnitude = adapter_tensors(layer)
            if magnitude is not None:
                with torch.no_grad():
                    magnitude.copy_(row_norms(layer.weight, None, None, Adapter()))  # type: ignore[arg-type]
    without_fast_paths(module, PackedLinear)
    return module


def _chosen(module: nn.Module, quantize: Quantize) -> dict[str, nn.Module]:
    first: dict[int, str] = {}
    modules = {n: m for n, m in canonical_modules(module) if first.setdefault(id(m), n) == n}
    linear = {name: layer for name, layer in modules.items() if out_dim_of(layer) is not None and name}
    shared: dict[int, int] = {}
    for layer in modules.values():
        for param in layer._parameters.values():
            shared[id(param)] = shared.get(id(param), 0) + 1
    left = left_out(module, modules, linear)
    why = {name: _why_not(layer, modules, name, shared) for name, layer in linear.items()}
    if quantize.targets == ALL_LINEAR:
        found = [name for name in linear if name not in left and not why[name]]
    else:
        found = []
        for pattern in quantize.targets:
            matching = names_matching(modules, pattern)
            if not (hits := [name for name in matching if name in linear]):
                instead = (
                    "leave it out: it stays plain, as in transformers, whose weights in 4 bits are those of layers"
                )
                raise matches_nothing(
                    "Quantize", "targets", pattern, modules, matching, linear, in_no_layer(module), instead
                )
            found += hits
        if unfit := next((name for name in found if why[name]), None):
            raise UnsupportedError(
                f"4 bits for the weight of a {type(linear[unfit]).__name__}",
                why=why[unfit],
                fix="leave it out of the targets, or keep it: Quantize(keep=(...))",
                name=unfit,
            )
    for pattern in quantize.keep:
        if not (hits := names_matching(found, pattern)):
            raise matches_nothing("Quantize", "keep", pattern, found, [], dict.fromkeys(found))
        found = [name for name in found if name not in hits]
    if not found and not packed_layers(module):
        reason = next((f": {name}: {text}" for name, text in why.items() if text), "")
        raise PlanError(
            f'quantize="{quantize.kind}" of a {type(module).__name__}',
            why=f"it has no weight that could be stored so{reason}",
            fix="freeze what is not trained (requires_grad_(False)), or train adapters beside it: lora=sw.LoRA(rank=16); or leave quantize out",
        )
    return {name: layer for name, layer in linear.items() if name in found}


def _why_not(layer: nn.Module, modules: Mapping[str, nn.Module], name: str, shared: Mapping[int, int]) -> str:
    """Why a layer's weight stays plain; "" if there is no reason."""
    if isinstance(modules.get(name.rpartition(".")[0]), nn.MultiheadAttention):
        return "nn.MultiheadAttention reads the weight and does not call its layer"
    if out_dim_of(layer) != 0:
        return "its weight has the inputs first"
    if "weight" not in layer._parameters:
        return "its weight is computed from other tensors"
    if has_own_forward(layer) or "forward" in vars(layer):
        return "it has a forward of its own, which reads the weight"
    weight = layer._parameters["weight"]
    if weight is None or not weight.is_floating_point():
        return "its weight is not of floating numbers"
    if weight.requires_grad:
        return "its weight is trained"
    return "its weight is tied to another name" if shared[id(weight)] > 1 else ""
