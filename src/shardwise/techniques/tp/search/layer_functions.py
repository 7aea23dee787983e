"""Shows that a layer function (:data:`~shardwise.model.layers.LAYER_FUNCTIONS`) can be cut along the dims that it names.

Runs in which layers return random outputs do not show what a layer computes. What a plain linear layer does is known; the code of another
function is run here on small tensors, whole and in parts, in float64: its outputs, and the gradients of all its tensors.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.model.layers import LAYER_FUNCTIONS, Layer, Role

_GATE = 1e-12
_PER_RANK, _OTHER = 2, 3  # sizes: of a rank's part of the outputs or inputs; of dims that are neither
_INPUT, _OUTPUT, _BIAS = (None, "in"), (None, "out"), ("out",)

Side = Literal["out", "in"]


def parts_differ(layer: Layer, degree: int) -> str:
    """Why the layer's function on parts does not give that of the whole; "" if it does, or if it is a plain linear layer."""
    if layer.function is None:
        return ""
    function, how = layer.function
    has = {each.role for each in layer.further}
    return _parts_differ(function, how, tuple(role in has for role in LAYER_FUNCTIONS[function]), degree)


@functools.lru_cache(maxsize=64)
def _parts_differ(function: Any, how: Any, has: tuple[bool, ...], degree: int) -> str:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weight: Role = ("out", "in") if how.out_dim == 0 else ("in", "out")
    further = [role for role, is_here in zip(LAYER_FUNCTIONS[function], has, strict=True) if is_here]
    roles: list[Role] = [_OUTPUT, _INPUT, weight, _BIAS, *further]  # of the gradient that comes, and of all tensors
    tensors = [draw(*(_OTHER if side is None else _PER_RANK * degree for side in role)) for role in roles]
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


class _Call(NamedTuple):
    """Calls of a layer function with those of its further tensors that a layer has."""

    function: Any
    has: tuple[bool, ...]

    def run(self, given: list[Tensor], how: Any, *, has_bias: bool = True) -> list[Tensor]:
        """The outputs, and the gradients of the input and all tensors. ``given``: the gradient of the outputs, and those."""
        gradient, *tensors = given
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        x, weight, bias, *rest = leaves
        further = [rest.pop(0) if is_here else None for is_here in self.has]
        y = self.function(x, weight, bias if has_bias else None, *further, how, False)
        grads = torch.autograd.grad(y, leaves, gradient, allow_unused=True)
        found = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(leaves, grads, strict=True)]
        return [y.detach(), *found]


def _of_ranks(
    call: _Call, tensors: list[Tensor], roles: list[Role], side: Side, how: Any, degree: int
) -> list[list[Tensor]]:
    """What each rank computes of its part."""
    given = [[_part(t, r, side, rank, degree) for t, r in zip(tensors, roles, strict=True)] for rank in range(degree)]
    if side == "out":
        return [call.run(each, how) for each in given]
    sent: list[Tensor] = []

    def send(value: Tensor) -> Tensor:
        sent.append(value)
        return value

    for each in given:  # what ranks would sum, which all of them then get
        call.run(each, dataclasses.replace(how, sum_over_inputs=send), has_bias=False)
    total = torch.stack(sent).sum(0) if sent else None
    summed = dataclasses.replace(how, sum_over_inputs=lambda _: total)
    return [call.run(each, summed, has_bias=False) for each in given]


def _part(tensor: Tensor, role: Role, side: Side, rank: int, degree: int) -> Tensor:
    return tensor.chunk(degree, role.index(side))[rank] if side in role else tensor
