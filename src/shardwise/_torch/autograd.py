"""State of autograd: the running backward, hooks on tensors, function modes, recomputing checkpoints."""

import contextlib
import functools
import gc
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter, length_hint
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unseen
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

from shardwise._torch.patches import patch

__all__ = [
    "Backward",
    "BackwardPath",
    "LeafUse",
    "RunningBackward",
    "Side",
    "StopRecomputation",
    "TorchDispatchMode",
    "accumulator_is_held",
    "at_end_of_backward",
    "before_backward",
    "checkpointed",
    "current_backward",
    "first_nodes",
    "freed_leaf",
    "function_modes",
    "graph_below",
    "has_users_hook",
    "hook_counts",
    "hooks_of_saved_tensors",
    "in_backward",
    "in_transform",
    "is_of_operator",
    "leaf_uses",
    "mark_output",
    "marks_of",
    "num_hooks",
    "on_inputs",
    "path_of",
    "runs_again",
    "share_hooks",
    "unseen",
    "unseen_writes",
    "without_subclasses",
]


_TENSOR_HOOKS, _POST_ACCUMULATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")

without_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context manager: functions of tensors are not given to the subclasses of ``Tensor`` among their arguments."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls ``call`` when the running backward ends. May only be called from inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_transform() -> bool:
    """Whether code runs in torch.vmap or a transform of torch.func: tensors there stand for others."""
    return torch._C._are_functorch_transforms_active()


def runs_again(tensor: Tensor) -> bool:
    """Whether a part of what gave ``tensor`` is run again in its backward, by torch's reentrant checkpoint."""
    return any(True for _ in first_nodes(tensor, "CheckpointFunctionBackward"))


def first_nodes(tensor: Tensor, name: str) -> Iterator[Any]:
    """The nodes of this name in the graph of ``tensor``: the first one on each way."""
    return (node for node in graph_below([tensor.grad_fn], lambda node: node.name() == name) if node.name() == name)


def graph_below(nodes: Iterable[Any], is_last: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """These nodes of a graph, and those below them, each once; below those that are the last of their way, none."""
    waiting, seen = [*nodes], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not is_last(node):
            waiting += [inner for inner, _ in node.next_functions]


def is_of_operator(kind: type) -> bool:
    """Whether an autograd function is that of a custom operator (``torch.library.custom_op``), whose backward is the user's."""
    return kind.__module__ == "torch._library.autograd"


Side = Literal["whole", "part", "unknown"]
"""What the gradient is that comes to a node: the same on every rank; a part of a sum over them; or not known, as what is compiled does not show."""


class LeafUse(NamedTuple):
    """A use of a leaf in a graph.

    Attributes:
        leaf: the tensor.
        node, index: what gives it a gradient, and which of its results that is; None: the leaf is itself an output.
        sides: what this gradient is: more than one where it is a sum of such.
    """

    leaf: Tensor
    node: Any
    index: int
    sides: Collection[Side]


def leaf_uses(
    outputs: Iterable[Any], sides_behind: Callable[[Any, Side], Side | Sequence[Side] | None]
) -> Iterator[LeafUse]:
    """The uses of leaves in the graph of ``outputs``, tensors or edges, whose gradients are whole. ``sides_behind``: what the gradients are that an
    autograd function gives for one of such a side, all or each of them; None: as that. It is called before each backward, and takes 1 us for a node."""
    waiting: list[tuple[Any, Side, Any, int]] = [(node, "whole", None, 0) for node in _begins(outputs)]
    sides: dict[Any, set[Side]] = {}
    uses: dict[tuple[Any, int], tuple[Tensor, set[Side]]] = {}
    while waiting:
        node, side, user, index = waiting.pop()
        known = sides.get(node)
        if known is not None and side in known:
            continue
        inner = node.next_functions
        if not inner:
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                uses.setdefault((user, index), (leaf, set()))[1].add(side)
            continue
        if known is None:
            sides[node] = {side}
        else:
            known.add(side)
        each: Sequence[Side] | None = None
        if (
            isinstance(node, torch.autograd.function.BackwardCFunction)
            and (other := sides_behind(node, side)) is not None
        ):
            side, each = (other, None) if isinstance(other, str) else (side, other)
        waiting += [
            (before, side if each is None else each[i], node, i)
            for i, (before, _) in enumerate(inner)
            if before is not None
        ]
    for (user, index), (leaf, of_use) in uses.items():
        yield LeafUse(leaf, user, index, of_use)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running backward, which no other has; -1 outside of one."""


def in_backward() -> bool:
    """Whether this thread is running a node of a backward."""
    return current_backward() != -1


class RunningBackward:
    """What kind of backward is running: asked by the hook of the first parameter that it reaches, and known for the rest."""

    def __init__(self) -> None:
        self._task, self._accumulates = -1, False

    def accumulates(self, param: Tensor) -> bool:
        """Whether it accumulates into ``.grad``, of this parameter as of all whose hooks it runs; ``torch.autograd.grad`` does
        not. Only valid inside a backward."""
        task = current_backward()
        if task != self._task:
            self._task, self._accumulates = task, _is_accumulated(param)
        return self._accumulates


def _is_accumulated(param: Tensor) -> bool:
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node)
    except RuntimeError as error:  # what torch raises for a leaf that is an input of autograd.grad
        if "autograd.grad()" not in str(error):
            raise
        return False


_MARK = "shardwise"


def mark_output(tensor: Tensor, by: Any) -> None:
    """Notes in the graph that ``tensor`` is an output, with a hook, of ``by``; see :func:`freed_leaf` and :func:`marks_of`."""
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_MARK] = by


class BackwardPath(NamedTuple):
    """What a backward passes.

    Attributes:
        mark: of the first marked output that is found; see :func:`mark_output`. None: it passes none.
        leaves: the leaves that it comes to, as far as they were found before the mark.
        is_compiled: it passes what was compiled, whose inner marks do not show.
    """

    mark: Any
    leaves: list[Tensor]
    is_compiled: bool


def path_of(outputs: Sequence[Any], *, past_marks: bool = False) -> BackwardPath:
    """What a backward from ``outputs`` passes. Walks until the first marked output, which is near the end of a model; without one, or
    ``past_marks``, the whole graph."""
    leaves, is_compiled, mark = list[Tensor](), False, None
    for node in _nodes(outputs, past_marks=True):
        mark = node.metadata.get(_MARK) if mark is None else mark
        if mark is not None and not past_marks:
            break
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.append(leaf)
        is_compiled = is_compiled or node.name().startswith("CompiledFunction")
    return BackwardPath(mark, leaves, is_compiled)


def freed_leaf(outputs: Sequence[Any]) -> Tensor | None:
    """A leaf without memory that a backward from ``outputs`` comes to without passing a marked output."""
    for node in _nodes(outputs, past_marks=False):
        leaf: Any = getattr(node, "variable", None)
        is_plain = type(leaf) in (Tensor, torch.nn.Parameter) and not leaf.is_meta
        if is_plain and leaf.numel() and not leaf.untyped_storage().size():
            return leaf
    return None


def marks_of(outputs: Sequence[Any]) -> list[Any]:
    """What :func:`mark_output` was given for the outputs that a backward from ``outputs`` passes."""
    return [node.metadata[_MARK] for node in _nodes(outputs, past_marks=True) if _MARK in node.metadata]


def _nodes(outputs: Sequence[Any], *, past_marks: bool) -> Iterator[Any]:
    """The nodes of the graph below ``outputs``, tensors or edges; marked ones are the last of their branch unless ``past_marks``."""
    return graph_below(_begins(outputs), lambda node: not past_marks and _MARK in node.metadata)


def _begins(outputs: Iterable[Any]) -> list[Any]:
    """The nodes that a backward from ``outputs`` begins with; of a leaf, what adds to its gradient."""
    found = []
    for x in outputs:
        node = getattr(x, "grad_fn", None) or getattr(x, "node", None)
        if node is None and isinstance(x, Tensor) and x.requires_grad:
            node = torch.autograd.graph.get_gradient_edge(x).node
        found += [] if node is None else [node]
    return found


_WHY = "looks at the graph of each backward: one that reaches a sharded model belongs to a window; inputs= are the tensors it computes with"


class Backward(NamedTuple):
    """A backward that is about to run.

    Attributes:
        outputs: the tensors, or edges of the graph, that it begins with.
        inputs: the only ones that it gives gradients of; empty: all.
        accumulates: into ``.grad``; ``torch.autograd.grad`` does not.
        makes_graph: of its own computation (``create_graph=True``).
        until_end: is closed when it has run.
        is_inner: another one has started it, as torch's reentrant checkpoint does.
    """

    outputs: Sequence[Any]
    inputs: Sequence[Any]
    accumulates: bool
    makes_graph: bool
    until_end: contextlib.ExitStack
    is_inner: bool


def before_backward(look: Callable[[Backward], Any], look_at_inner: Callable[[Backward], None] | None = None) -> None:
    """Calls ``look`` before each backward, and ``look_at_inner`` before one that another one has started. May be called again with the same function.
    Gradients that are part of a graph are marked by what ``look`` returns, unless it is None; see :func:`mark_output`."""
    if look in _lookers:
        return
    _lookers.append(look)
    run = torch.autograd._engine_run_backward

    @functools.wraps(run)
    def run_backward(outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        accumulates = bool(kwargs.get("accumulate_grad"))
        with contextlib.ExitStack() as until_end:
            given = Backward(outputs, inputs or (), accumulates, bool(create), until_end, in_backward())
            mark = None if given.is_inner else look(given)
            if given.is_inner and look_at_inner is not None:
                look_at_inner(given)
            found = run(outputs, grads, retain, create, inputs, *args, **kwargs)
        for grad in found or () if mark is not None and create else ():
            if isinstance(grad, Tensor):
                mark_output(grad, mark)
        return found

    patch(torch.autograd, "_engine_run_backward", run_backward, _WHY, is_guard=False)


_lookers: list[Callable[[Backward], Any]] = []


def on_inputs(replace: Callable[[Sequence[Any], bool, bool], Sequence[Any]]) -> None:
    """Calls ``replace(inputs, accumulates, makes_graph)`` before each ``backward(inputs=...)`` and ``torch.autograd.grad``, and differentiates with
    respect to what it returns. ``accumulates``: into ``.grad``; ``makes_graph``: of its own computation. May be called again with the same function."""
    run = torch.autograd._engine_run_backward
    if getattr(run, "shardwise_replaces", None) is replace:
        return

    def run_backward(outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs:
            inputs = replace(inputs, bool(kwargs.get("accumulate_grad")), bool(create))
        return run(outputs, grads, retain, create, inputs, *args, **kwargs)

    run_backward.shardwise_replaces = replace  # type: ignore[attr-defined]
    patch(torch.autograd, "_engine_run_backward", run_backward, _WHY, is_guard=False)


def unseen_writes(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Context manager: a backward of what has saved one of ``tensors`` does not see that they are written."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def checkpointed(error: BaseException) -> Any:
    """The function that ``torch.utils.checkpoint`` was recomputing when ``error`` was raised; None if it was not."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        again = getattr(frame.f_locals.get("frame"), "recompute_fn", None)
        if again is not None:
            return again.__closure__[again.__code__.co_freevars.index("fn")].cell_contents
    return None


def hooks_of_saved_tensors() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost active pair of ``torch.autograd.graph.saved_tensors_hooks``; None: there is none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def num_hooks(tensor: Tensor) -> tuple[int, int]:
    """Number of hooks on ``tensor`` by ``register_hook`` and by ``register_post_accumulate_grad_hook``."""
    return len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ())


def accumulator_is_held(tensor: Tensor) -> bool:
    """Whether an object of Python holds the node that accumulates the gradient of a leaf, as what has put a hook on the node does: a node does
    not outlive what holds it. torch does not say which hooks a node has."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    # 2: this variable and the argument. A graph that is alive counts too, and has no referrer.
    return sys.getrefcount(node) > 2 and any(not isinstance(each, FrameType) for each in gc.get_referrers(node))


def has_users_hook(tensor: Tensor) -> bool:
    """Whether one of its hooks by ``register_hook`` is not Shardwise's."""
    hooks = (tensor._backward_hooks or {}).values()
    return any(not (getattr(hook, "__module__", None) or "").startswith("shardwise.") for hook in hooks)


def hook_counts(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """:func:`num_hooks` of many tensors, as two lists."""
    # length_hint(None) is 0: a tensor without hooks has no dict.
    return (
        list(map(length_hint, map(_TENSOR_HOOKS, tensors))),
        list(map(length_hint, map(_POST_ACCUMULATE_HOOKS, tensors))),
    )


def share_hooks(tensor: Tensor, other: Tensor) -> None:
    """Puts the hooks of ``tensor`` on ``other`` too. Both share one collection, so a handle removes from both."""
    on_tensor, after = num_hooks(tensor)
    if on_tensor:
        other._backward_hooks = tensor._backward_hooks
    if after:
        other._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def function_modes() -> list[Any]:
    """The active ``TorchFunctionMode`` stack, outermost first."""
    return torch.overrides._get_current_function_mode_stack()
