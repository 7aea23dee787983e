"""What is only known while ``torch.compile`` makes a graph, and what a graph keeps for backward."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["changed_in_graphs", "look_in_graph", "mark_in_graph", "memory_budget"]


changed_in_graphs: set[type] = set()
"""Classes of modules in which :func:`look_in_graph` has seen a marked tensor change."""


_made_in_graphs = WeakIdKeyDictionary()  # what stands for a tensor while a graph is made -> its version


def mark_in_graph(tensor: Tensor) -> None:
    """In code that is being compiled: :func:`look_in_graph` will tell whether ``tensor`` was changed in place since. Neither leaves
    anything in the graph."""
    from torch._dynamo.comptime import comptime  # takes a second to import

    comptime(_note_made)


def look_in_graph(module: nn.Module, tensor: Tensor) -> None:
    """Remembers the class of ``module`` if ``tensor``, marked before, was changed; without a guard on ``module``: blocks that are
    alike go on sharing one graph."""
    from torch._dynamo.comptime import comptime

    comptime(_note_change)


def _note_made(context: Any) -> None:
    """Reads the local variables of its caller; a function with variables of its own is not taken."""
    made = context.get_local("tensor").as_fake()
    _made_in_graphs[made] = made._version


def _note_change(context: Any) -> None:
    found = context.get_local("tensor").as_fake()
    if found._version != _made_in_graphs.get(found, found._version):
        changed_in_graphs.add(context.get_local("module").python_type())


@contextlib.contextmanager
def memory_budget(budget: float) -> Iterator[None]:
    """Within: graphs that are compiled keep this part of their activations for backward, and every random number.

    torch counts ``bernoulli``, of which dropout is made, among what may be run again, where it draws anew: with a budget below
    1 gradients belonged to other dropout masks, without an error. A budget of exactly 0 keeps nothing whatever is banned.
    """
    from torch._functorch import config, partitioners

    choose = partitioners.choose_saved_values_set

    def keeping_random(joint_graph: Any, *args: Any, **kwargs: Any) -> Any:
        for node in joint_graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return choose(joint_graph, *args, **kwargs)

    partitioners.choose_saved_values_set = keeping_random  # type: ignore[assignment]
    try:
        with config.patch(activation_memory_budget=budget + 1e-9 if budget < 1 else budget):
            yield
    finally:
        partitioners.choose_saved_values_set = choose
