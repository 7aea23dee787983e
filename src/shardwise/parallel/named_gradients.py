"""Gradients that are asked for by name: ``backward(inputs=...)`` and ``torch.autograd.grad`` of a sharded model's parameters.

Outside of a running forward the model shows shards, and forward has computed with gathered copies: autograd finds no way from a loss
to a shard, and says nothing. ``backward(inputs=...)`` is given the copies instead, whose gradients are reduced as any others.
"""

from collections.abc import Sequence
from typing import Any

from shardwise._torch.autograd import on_inputs
from shardwise.errors import UnsupportedError
from shardwise.parallel.backwards import is_unchecked
from shardwise.parallel.runtime import Runtime, runtimes_in_use
from shardwise.techniques.data.gradients import outside_of_windows


class OwnGradients:
    """Whether torch.autograd.grad has given gradients of this rank alone since gradients of the model were summed.

    Attributes:
        are_there: those that may be meant for a step by hand.
        may_be_added: any, which the loop may add to others.
    """

    are_there = False
    may_be_added = False


def watch_named_gradients() -> None:
    """Installs, once, what looks at the inputs of each backward that has some."""
    on_inputs(_replaced)


def _replaced(inputs: Sequence[Any], accumulates: bool, makes_graph: bool) -> Sequence[Any]:
    """What autograd is to be given for ``inputs``.

    Raises:
        UnsupportedError: ``torch.autograd.grad`` of what a rank has a part of.
    """
    if is_unchecked():
        return inputs
    # An edge of the graph may stand for a leaf: torch.autograd.graph.get_gradient_edge(param).
    inputs = [getattr(getattr(x, "node", None), "variable", x) for x in inputs]
    found = {id(x): x for x in inputs}
    for runtime in runtimes_in_use():
        own = {id(param): name for name, param in runtime.parameters.items() if id(param) in found}
        if not own:
            continue
        if accumulates:
            copies = {id(shard): copy for copy, shard in runtime.engine.gathered()}
            found |= {key: copies.get(key, found[key]) for key in own}
        else:
            _refuse_parts(runtime, own, makes_graph)
    return tuple(found[id(x)] for x in inputs)


def _refuse_parts(runtime: Runtime, own: dict[int, str], makes_graph: bool) -> None:
    """``own``: id -> name of the model's parameters of which the gradient is to be returned."""
    name = next(iter(own.values()))
    is_cut = any(runtime.recipe.params[each].cuts for each in own.values())
    if not runtime.recipe.is_cut and not (is_cut or runtime.partial):
        if runtime.accumulation is None and runtime.world.size > 1:
            raise outside_of_windows(
                runtime.world.axis("loss").size, name=name, what="torch.autograd.grad of the parameters"
            )
        runtime.memory(OwnGradients).may_be_added = True
        # Of this rank's data. Without a graph it may be meant for a step by hand, which is warned of.
        if not makes_graph and runtime.world.axis("loss").size > 1:
            runtime.memory(OwnGradients).are_there = True
        return
    axes = dict.fromkeys(
        [*(cut.axis for each in own.values() for cut in runtime.recipe.params[each].cuts), *runtime.partial]
    )
    why = (
        "forward computes with gathered copies, and the parameters that the model shows are shards outside of it"
        if runtime.recipe.is_cut
        else f"the model is cut over {', '.join(axes)}, so that a rank computes a part of its gradients"
    )
    raise UnsupportedError(
        "torch.autograd.grad of the model's parameters",
        why=why,
        fix="call backward(), with inputs=[...] for some of them, and read param.grad; or keep parameters whole on every rank, "
        'sw.init("dp_replicate=-1"), and put what it gives into param.grad inside the window, which sums it over the ranks',
        name=name,
    )
