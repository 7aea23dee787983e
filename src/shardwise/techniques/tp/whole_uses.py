"""What comes to parameters past the layers that are cut over ``tp``: a penalty in the loss on the norm of each head, a loss of what a hook has seen of a
rank's heads.

Each graph shows it before its backward: gradients are the same on every rank, or parts of a sum, and change from one to the other at exchanges alone.

===========================  =====================================  ================================================
parameter                    gradients that are parts               gradients that are whole
===========================  =====================================  ================================================
cut: a rank has a part       as the layers give them                refused: the part was taken for all of it
whole, summed over ``tp``    summed at the end of a window          each rank takes its share, so that they count once
whole, not summed            refused: a rank would have a part      as without ``tp``
===========================  =====================================  ================================================
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise._torch.autograd import Backward, Side, leaf_uses
from shardwise.errors import UnsupportedError
from shardwise.recipe import Recipe


class WholeUses:
    """Looks at each backward of a model that is about to run.

    Args:
        recipe: of the model.
        partial: the parameters of whose gradient each rank has a part.
        group, size: name of the group of the ranks, and their number.
    """

    def __init__(self, recipe: Recipe, partial: Sequence[str], group: str, size: int):
        self._group, self._size, self._partial = group, size, frozenset(partial)
        self._is_mixed = False  # an exchange of the graph gets another gradient than it sums, or hands on
        self._cut = {name for name, param in recipe.params.items() if any(cut.axis == "tp" for cut in param.cuts)}

    def share(self, runtime: Any, backward: Backward) -> None:
        """Divides what is whole of the gradients of parameters that are summed over the ranks by their number, and refuses what is wrong on
        each rank."""
        names = {id(param): name for name, param in runtime.parameters.items()}
        names |= {id(copy): names[id(param)] for copy, param in runtime.engine.gathered() if id(param) in names}
        shared: dict[Any, list[int]] = {}
        self._is_mixed = False
        for leaf, node, index, sides in leaf_uses(backward.outputs, self._sides_behind):
            name = names.get(id(leaf))
            if name is None:
                continue
            if name in self._cut:
                if "whole" in sides:
                    raise _taken_for_all(name)
            elif name not in self._partial:
                if "part" in sides:
                    raise _on_parts(name)
            elif "whole" in sides:
                if backward.is_inner:
                    raise _checkpointed(name)
                if len(sides) > 1 or node is None:
                    raise _both(name, node is None)
                shared.setdefault(node, []).append(index)
        if self._is_mixed:
            raise _mixed()
        for node, places in shared.items():
            handle = node.register_hook(functools.partial(_shared, places, self._size))
            backward.until_end.callback(handle.remove)

    def _sides_behind(self, node: Any, side: Side) -> Side | Sequence[Side] | None:
        of, expected, sides = getattr(node, "sides", (None, None, None))
        if of is None:
            return sides or ("unknown" if node.name().startswith("CompiledFunction") else None)
        if of != self._group:
            return None
        self._is_mixed |= side not in (expected, "unknown")
        return sides


def _shared(places: Sequence[int], size: int, grads: Sequence[Tensor | None], _of_results: Any) -> tuple[Any, ...]:
    return tuple(grad / size if i in places and grad is not None else grad for i, grad in enumerate(grads))


_PENALTY = (
    "a penalty: sw.parameter_penalty(model, penalty) in a window of your own loop, or weight_decay= of the optimizer"
)


def _taken_for_all(name: str) -> UnsupportedError:
    return UnsupportedError(
        "a loss that comes to a parameter that is cut over tp past what its layers return",
        why="this rank has a part of it, and of what lies between the layers that are cut: a hook there, or another way through the code than on the "
        "example, has taken that for all of it",
        fix="return the value from the model, in every forward, so that the example shows it; or keep its layers whole: "
        "tensor_parallel=sw.TensorParallel(plan={...}); a penalty: weight_decay= of the optimizer",
        name=name,
    )


def _mixed() -> UnsupportedError:
    return UnsupportedError(
        "a loss of what lies between layers that are cut over tp",
        why="this rank has its part of that, or of the gradient: a hook there, or another way through the code than on the example, has taken it for all",
        fix="return the value from the model, in every forward, so that the example shows it; or keep the layers around it whole: "
        "tensor_parallel=sw.TensorParallel(plan={...})",
    )


def other_loss(entry: str) -> UnsupportedError:
    """For an entry of a loss that ranks along ``tp`` have other values of."""
    return UnsupportedError(
        f"the entry {entry!r} of a loss, of which ranks along tp have other values",
        why="they have the same samples, and what lies between layers that are cut over tp was taken for all of it: by another method than the forward "
        "that the example ran, a hook there, or another way through the code; or code of yours computes by the rank",
        fix="return the value from the model's forward, in every forward, so that the example shows it; or keep the layers around it whole: "
        "tensor_parallel=sw.TensorParallel(plan={...}); a figure of each rank, such as seconds, is no entry of a loss",
    )


def _on_parts(name: str) -> UnsupportedError:
    return UnsupportedError(
        "a parameter of whose gradient each rank along tp gets a part, and on the example got all",
        why="the code took another way: it is used between layers that are cut, or with this rank's positions, and nothing sums these parts",
        fix="pass example= with which the code takes this way; or keep its layers whole: tensor_parallel=sw.TensorParallel(plan={...})",
        name=name,
    )


def _checkpointed(name: str) -> UnsupportedError:
    return UnsupportedError(
        "a parameter of whose gradient each rank along tp has a part, used in a reentrant checkpoint",
        why="what its backward is of is not known when it runs: all of a gradient, or a part of a sum over the ranks",
        fix="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
        name=name,
    )


def _both(name: str, is_output: bool) -> UnsupportedError:
    return UnsupportedError(
        "a backward that begins with a parameter itself"
        if is_output
        else "a value of a parameter that is used both between layers that are cut over tp and outside of them",
        why="its gradients of the layers are parts, which are summed over the ranks, and every rank has the whole gradient of the other use",
        fix=f"compute the value anew from the parameter for the other use; {_PENALTY}",
        name=name,
    )
