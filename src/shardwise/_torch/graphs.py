"""Hooks into ``torch.compile`` while it traces a graph, and what a graph saves for backward."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakIdKeyDictionary

changed_in_graphs: set[type] = set()
"""Classes of modules in which :func:`look_in_graph` has seen a marked tensor change."""


_made_in_graphs = WeakIdKeyDictionary()  # fake tensor that stands for a tensor during tracing -> its version


def mark_in_graph(tensor: Tensor) -> None:
    """In code that is being compiled: notes the version of ``tensor``, so that :func:`look_in_graph` can see in-place
    changes. Neither function adds anything to the graph."""
    from torch._dynamo.comptime import comptime  # takes a second to import

    comptime(_note_made)


def look_in_graph(module: nn.Module, tensor: Tensor) -> None:
    """Records the class of ``module`` if ``tensor``, marked before, was changed in place. Adds no guard on ``module``,
    so that equal blocks still share one graph."""
    from torch._dynamo.comptime import comptime

    comptime(_note_change)


def _note_made(context: Any) -> None:
    """Reads the local variables of its caller; a closure is not accepted by ``comptime``."""
    made = context.get_local("tensor").as_fake()
    _made_in_graphs[made] = made._version


def _note_change(context: Any) -> None:
    found = context.get_local("tensor").as_fake()
    if found._version != _made_in_graphs.get(found, found._version):
        changed_in_graphs.add(context.get_local("module").python_type())


@contextlib.contextmanager
def memory_budget(budget: float) -> Iterator[None]:
    """Context manager: compiled graphs save this fraction of their activations for backward, and all random draws.

    torch counts ``bernoulli``, which dropout uses, among the operators it may recompute, and recomputing draws again:
    with a budget below 1, gradients belonged to other dropout masks, without an error. A budget of exactly 0 saves
    nothing, even what is marked to be saved.
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


def compile_with_limit(function: Callable[..., Any], limit: int, **options: Any) -> Callable[..., Any]:
    """``torch.compile`` of a function that may have ``limit`` graphs."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = limit
        return torch.compile(function, **options)
    compiled = torch.compile(function, **options)  # before torch 2.12: graphs are counted while the function is called

    @functools.wraps(function)
    def within_limit(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=limit):
            return compiled(*args, **kwargs)

    return within_limit
