"""Shows that a layer function (:data:`~shardwise.model.layers.LAYER_FUNCTIONS`) can be cut along the dims that it names.

Runs in which layers return random outputs do not show what a layer computes. What a plain linear layer does is known; the code of another
function is run here on small tensors, whole and in parts, in float64: its outputs, and the gradients of all its tensors.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.model.layers import BUFFER, LAYER_FUNCTIONS, Layer, Role
from shardwise.model.nf4 import GROUP, Packing

_GATE = 1e-12
_PER_RANK, _OTHER = 24, 3  # sizes: of a rank's part of the outputs or inputs; of dims that are neither
_INPUT, _OUTPUT, _BIAS = (None, "in"), (None, "out"), ("out",)

Side = Literal["out", "in"]


def parts_differ(layer: Layer, degree: int) -> str:
    """Why the layer's function on parts does not give that of the whole; "" if it does, or if it is a plain linear layer."""
    if layer.function is None:
        return ""
    function, how = layer.function
    packing = None if how.packing is None else Packing.of((_PER_RANK * degree, _PER_RANK * degree))
    has = {each.role for each in layer.further} | (set() if packing is None else {BUFFER})
    given = tuple(role in has for role in LAYER_FUNCTIONS[function])
    return _parts_differ(function, dataclasses.replace(how, packing=packing, sum_over_inputs=None), given, degree)


@functools.lru_cache(maxsize=64)
def _parts_differ(function: Any, how: Any, has: tuple[bool, ...], degree: int) -> str:
    weight: Role = ("out", "in") if how.out_dim == 0 else ("in", "out")
    further = [role for role, is_here in zip(LAYER_FUNCTIONS[function], has, strict=True) if is_here]
    roles: list[Role] = [_OUTPUT, _INPUT, weight, _BIAS, *further]  # of the gradient that comes, and of all tensors
    tensors = _drawn(roles, how, degree)
    call = _Call(function, has)
    with torch.enable_grad():
        whole = call.run(tensors, how)
        for side in ("out", "in"):
            of_ranks = _of_ranks(call, tensors, roles, side, how, degree)
            for place, (want, role) in enumerate(zip(whole, roles, strict=True)):
                if side == "in" and place == roles.index(_BIAS):
                    continue  # the bias is added to the sum
                parts = [each[place] for each in of_ranks]
                mine = torch.cat(parts, role.index(side)) if side in role else torch.stack(parts).sum(0)
                if side == "in" and place == 0:
                    mine = mine + tensors[roles.index(_BIAS)]
                if mine.shape != want.shape or float((mine - want).abs().max()) > _GATE * float(want.abs().max()):
                    what = "outputs" if place == 0 else f"gradient of its tensor {place}"
                    return f"{function.__name__}, of a part of its {side}puts on each rank, does not give the {what} of the whole"
    return ""


def _drawn(roles: list[Role], how: Any, degree: int) -> list[Tensor]:
    """A tensor of each role; a weight in bytes, the codes of its scales, and what those are made with, where ``how`` says so."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = [draw(*(_OTHER if side is None else _PER_RANK * degree for side in role)) for role in roles]
    if how.packing is not None:
        tensors[2] = draw(*how.packing.codes_shape).mul(100).abs().to(torch.uint8)
        scales = roles.index((None, None))
        outer = draw(-(-how.packing.num_blocks // GROUP)).abs()
        tensors[scales:] = [draw(*how.packing.scales_shape).mul(100).abs().to(torch.uint8), outer, draw().abs()]
    return tensors


class _Call(NamedTuple):
    """Calls of a layer function with those of its further tensors that a layer has."""

    function: Any
    has: tuple[bool, ...]

    def run(self, given: list[Tensor], how: Any, *, has_bias: bool = True) -> list[Tensor]:
        """The outputs, and the gradients of the input and all tensors. ``given``: the gradient of the outputs, and those."""
        gradient, *tensors = given
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
        x, weight, bias, *rest = leaves
        further = [rest.pop(0) if is_here else None for is_here in self.has]
        y = self.function(x, weight, bias if has_bias else None, *further, how, False)
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        grads = {
            id(t): g for t, g in zip(trained, torch.autograd.grad(y, trained, gradient, allow_unused=True), strict=True)
        }
        found = [torch.zeros_like(t) if grads.get(id(t)) is None else grads[id(t)] for t in leaves]
        return [y.detach(), *found]


def _of_ranks(
    call: _Call, tensors: list[Tensor], roles: list[Role], side: Side, how: Any, degree: int
) -> list[list[Tensor]]:
    given = [[_part(t, r, side, rank, degree) for t, r in zip(tensors, roles, strict=True)] for rank in range(degree)]
    hows = [
        how if how.packing is None else dataclasses.replace(how, packing=_packing(side, rank, degree))
        for rank in range(degree)
    ]
    if side == "out":
        return [call.run(each, of_rank) for each, of_rank in zip(given, hows, strict=True)]
    sent: list[Tensor] = []

    def send(value: Tensor) -> Tensor:
        sent.append(value)
        return value

    for each, of_rank in zip(given, hows, strict=True):  # what ranks would sum, which all of them then get
        call.run(each, dataclasses.replace(of_rank, sum_over_inputs=send), has_bias=False)
    total = torch.stack(sent).sum(0) if sent else None
    return [
        call.run(each, dataclasses.replace(of_rank, sum_over_inputs=lambda _: total), has_bias=False)
        for each, of_rank in zip(given, hows, strict=True)
    ]


def _packing(side: Side, rank: int, degree: int) -> Packing:
    """What a rank has of a weight in bytes."""
    size, start = _PER_RANK * degree, _PER_RANK * rank
    if side == "out":
        return Packing((size, size), ((start, _PER_RANK),), 0, size)
    return Packing((size, size), ((0, size),), start, _PER_RANK)


def _part(tensor: Tensor, role: Role, side: Side, rank: int, degree: int) -> Tensor:
    return tensor.chunk(degree, role.index(side))[rank] if side in role else tensor
