"""Uses, past the layers that are cut, of parameters of which each rank has a part of the gradient: a penalty in the loss on the norm of each head.

Such gradients are summed over the ranks at the end of a window. What comes to the parameter past the layers, all of it on every rank, would count
once for each: a rank takes its share of that. What is which shows in the graph: sides change at exchanges alone.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise._torch.autograd import Backward, Side, leaf_uses
from shardwise.errors import UnsupportedError


def share_whole_uses(runtime: Any, names: Sequence[str], group: str, size: int, backward: Backward) -> None:
    """Divides, in a backward that is about to run, what is whole of the gradients of some parameters by the number of ranks.

    Args:
        runtime: of the model.
        names: of the parameters of whose gradient each rank along the axis has a part.
        group, size: name of the group of the ranks, and their number.
        backward: is about to run.

    Raises:
        UnsupportedError: what a parameter gets is in part whole, and in part a part of the sum.
    """
    of_leaf = {id(runtime.parameters[name]): name for name in names}
    of_leaf |= {id(copy): of_leaf[id(param)] for copy, param in runtime.engine.gathered() if id(param) in of_leaf}
    whole: dict[Any, list[int]] = {}
    for use in leaf_uses(backward.outputs, functools.partial(_side_behind, group)):
        if (name := of_leaf.get(id(use.leaf))) is None or "whole" not in use.sides:
            continue
        if len(use.sides) > 1 or use.node is None:
            raise UnsupportedError(
                "a value of a parameter that is used both within layers that are cut over tp and outside of them"
                if use.node is not None
                else "a backward of a parameter itself",
                why="every rank has the whole gradient of the use outside, and within, a part of one that is summed over the ranks",
                fix="compute the value anew from the parameter for the use outside of the layers; a penalty: sw.parameter_penalty(model, penalty) in a "
                "window of your own loop, or weight_decay= of the optimizer",
                name=name,
            )
        whole.setdefault(use.node, []).append(use.index)
    for node, places in whole.items():
        backward.until_end.callback(node.register_hook(functools.partial(_shared, places, size)).remove)


def _side_behind(group: str, node: Any) -> Side | None:
    of, side = getattr(node, "side_behind", (None, None))
    if of is not None:
        return side if of == group else None
    return "unknown" if node.name().startswith("CompiledFunction") else None


def _shared(places: Sequence[int], size: int, grads: Sequence[Tensor | None], _of_results: Any) -> tuple[Any, ...]:
    return tuple(grad / size if i in places and grad is not None else grad for i, grad in enumerate(grads))
