"""Shows that a layer function (:data:`~shardwise.model.layers.LAYER_FUNCTIONS`) can be cut along the dims that it names.

Runs in which layers return random outputs do not show what a layer computes. What a plain linear layer does is known; the code of another
function is run here on small tensors, whole and in parts, in float64: its outputs, and the gradients of all its tensors.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.model.layers import LAYER_FUNCTIONS, Layer, Role

_GATE = 1e-12
_PER_RANK, _OTHER = 2, 3  # sizes: of a rank's part of the outputs or inputs; of dims that are neither


def parts_differ(layer: Layer, degree: int) -> str:
    """Why the layer's function on parts does not give that of the whole; "" if it does, or if it is a plain linear layer."""
    if layer.function is None:
        return ""
    function, how = layer.function
    given = {each.role for each in layer.further}
    return _compared(function, how, tuple(role in given for role in LAYER_FUNCTIONS[function]), degree)


@functools.lru_cache(maxsize=64)
def _compared(function: Any, how: Any, given: tuple[bool, ...], degree: int) -> str:
    roles: list[Role] = [("out", "in") if how.out_dim == 0 else ("in", "out"), ("out",)]
    roles += [role for role, has in zip(LAYER_FUNCTIONS[function], given, strict=True) if has]
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x, gradient = draw(4, _PER_RANK * degree), draw(4, _PER_RANK * degree)
    tensors = [draw(*(_OTHER if side is None else _PER_RANK * degree for side in role)) for role in roles]
    name = getattr(function, "__name__", str(function))

    def run(x: Tensor, tensors: Sequence[Tensor], gradient: Tensor, how: Any, bias: bool) -> list[Tensor]:
        """Outputs, and gradients of all tensors."""
        leaves = [each.detach().clone().requires_grad_() for each in (x, *tensors)]
        rest = iter(leaves[3:])
        further = [next(rest) if has else None for has in given]
        y = function(leaves[0], leaves[1], leaves[2] if bias else None, *further, how, False)
        grads = torch.autograd.grad(y, leaves, gradient, allow_unused=True)
        return [y.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True))]

    with torch.enable_grad():
        whole = run(x, tensors, gradient, how, True)
        for side, of_x, of_y in (("out", None, -1), ("in", -1, None)):
            parts = [
                [_part(t, role, side, rank, degree) for t, role in zip(tensors, roles, strict=True)]
                for rank in range(degree)
            ]
            inputs = [x if of_x is None else x.chunk(degree, -1)[rank] for rank in range(degree)]
            wanted = [gradient if of_y is None else gradient.chunk(degree, -1)[rank] for rank in range(degree)]
            hows = [how] * degree
            if side == "in":  # what a rank computes of its inputs, and the sum of all ranks
                seen: list[Tensor] = []
                noting = dataclasses.replace(how, sum_over_inputs=lambda value: seen.append(value) or value)
                for rank in range(degree):
                    run(inputs[rank], parts[rank], wanted[rank], noting, False)
                total = torch.stack(seen).sum(0) if seen else None
                hows = [dataclasses.replace(how, sum_over_inputs=lambda _: total)] * degree
            of_ranks = [run(inputs[r], parts[r], wanted[r], hows[r], side == "out") for r in range(degree)]
            sides: list[Role] = [(None, "out"), (None, "in"), *roles]
            for place, (want, role) in enumerate(zip(whole, sides, strict=True)):
                have = [each[place] for each in of_ranks]
                if side == "in" and role == ("out",) and place == 3:
                    continue  # the bias, which is added to the sum
                dim = role.index(side) if side in role else None
                mine = torch.stack(have).sum(0) if dim is None else torch.cat(have, dim)
                if side == "in" and place == 0:
                    mine = mine + tensors[1]
                if mine.shape != want.shape or float((mine - want).abs().max()) > _GATE * float(want.abs().max()):
                    what = "outputs" if place == 0 else f"gradient of tensor {place}"
                    return f"{name} with a part of its {side}puts on each rank does not give the {what} of the whole"
    return ""


def _part(tensor: Tensor, role: Role, side: str, rank: int, degree: int) -> Tensor:
    return tensor.chunk(degree, role.index(side))[rank] if side in role else tensor  # type: ignore[arg-type]
