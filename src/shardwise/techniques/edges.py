"""Autograd functions and hooks at the edges of a unit: on its inputs, its outputs, and whole parameters' gradients."""

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import mark_output, unseen
from shardwise._torch.stand_ins import StandIn
from shardwise.errors import UnsupportedError, UsageError
from shardwise.model.pytrees import Replaced, leaves_of, map_leaves, tensors_within

GATHERS = "_shardwise_gathers"
"""Attribute of a module with sharded parameters: the function to call before its forward is recomputed in a backward,
which does not run its hooks."""


class _NotAView(torch.autograd.Function):
    """Identity whose result is not a view: same memory, a graph node of its own."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class WhenLeft(torch.autograd.Function):
    """Identity that calls a function when the gradients of all its results have been computed."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an unused tensor gets no gradient, and neither does what produced it
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.call()
        return (None, *grads)


def when_left(given: Any, call: Callable[[], None]) -> Replaced | None:
    """The arguments of a forward, whose gradients call ``call`` when backward has left the module; None: none of them has
    a gradient."""
    tensors = {id(x): x for x in leaves_of(given) if isinstance(x, Tensor) and x.requires_grad}
    if not tensors:
        return None
    left = dict(zip(tensors, WhenLeft.apply(call, *tensors.values()), strict=True))
    return Replaced(lambda x: left.get(id(x), x), given)


Views = list[tuple["weakref.ref[Tensor]", int]]
"""Output tensors that were replaced when they were returned, and their versions at that time."""


def refuse_changed(views: Views) -> None:
    """Raises UnsupportedError for an output that was replaced (see :func:`hand_out`), whose replacement was changed in
    place, and which is still referenced. It has the new values without their autograd history, so that a loss taken
    from it would have wrong gradients, without an error."""
    for view, version in views:
        tensor = view()
        if tensor is not None and tensor._version != version:
            raise UnsupportedError(
                f"a block's output of shape {tuple(tensor.shape)} that is kept (an attribute, a hook) and changed in place by others",
                why="what the block returned is a view, which is handed on as a tensor of its own: the one that is kept does not know "
                "of the change, and gradients through it would be wrong",
                fix="keep a copy (output.clone()), or let the change make a new tensor: x = x * y and not x *= y",
            )


def hand_out(
    output: Any, reached: Callable[[Tensor], None], views: Views, through: Callable[[Any], None] | None = None
) -> tuple[Any, bool]:
    """``output`` of a forward, whose tensors call ``reached`` when a gradient reaches them, and ``through`` when it goes on into the
    forward; and whether it may hold tensors that cannot be found (in a closure or a generator).

    Views are replaced by tensors that are not views: an in-place operation on a view drops its hooks, a Linear on 3-D
    input returns one, and ``y = block(x); y += x`` is common. Nothing is copied; ``views`` records each for
    :func:`refuse_changed`.
    """

    output = map_leaves(lambda leaf: _handed_out(leaf, reached, views, through), output)
    others, is_complete = tensors_within(output)
    for tensor in others:
        if tensor.requires_grad:
            _hook(tensor, reached, through)
    return output, not is_complete


def _hook(tensor: Tensor, reached: Callable[[Tensor], None], through: Callable[[Any], None] | None) -> None:
    tensor.register_hook(reached)
    mark_output(tensor, getattr(reached, "of", None))
    if through is not None and tensor.grad_fn is not None:
        tensor.grad_fn.register_prehook(through)


def _handed_out(
    leaf: Any, reached: Callable[[Tensor], None], views: Views, through: Callable[[Any], None] | None = None
) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        _hook(leaf, reached, through)
        if leaf._is_view():
            views.append((weakref.ref(leaf), leaf._version))
            return _NotAView.apply(leaf)
    return leaf


class Inputs:
    """What a forward was given: what it leaves in the lists, dicts and dataclasses among it is an output too."""

    def __init__(self, given: Any):
        self._given = given
        self._replaced: Replaced | None = None
        may_write = any(not isinstance(x, Tensor | tuple) and _is_container(x) for x in _arguments(given))
        # Kept alive, so that no id is used twice.
        self._known = {id(x): x for x in leaves_of(given) if isinstance(x, Tensor)} if may_write else None

    def when_left(self, call: Callable[[], None]) -> Any:
        """The arguments to call with; their gradients call ``call`` when backward has left the module."""
        self._replaced = when_left(self._given, call)
        if self._replaced is None:
            return self._given
        if self._known is not None:
            self._known |= {id(x): x for x in leaves_of(self._replaced.value) if isinstance(x, Tensor)}
        return self._replaced.value

    def hand_out(self, reached: Callable[[Tensor], None], views: Views) -> None:
        """:func:`hand_out` of tensors that the forward has left in what it was given."""
        if self._known is not None:
            known = self._known
            Replaced(lambda x: x if id(x) in known else _handed_out(x, reached, views), self._given)

    def undo(self) -> None:
        """Puts the caller's own tensors back."""
        if self._replaced is not None:
            self._replaced.undo()


def _arguments(given: Any) -> list[Any]:
    args, kwargs = given
    return [*args, *kwargs.values()]


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict) or dataclasses.is_dataclass(value)


def calls(method: types.MethodType, number: int) -> Callable[[Tensor], None]:
    """A hook on a parameter that calls a bound method with ``number``. It keeps nothing alive, as hooks live in C++,
    where a cycle is never freed, and has no weak reference to a parameter, with which ``module.to`` could not swap
    it."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def hook(_tensor: Tensor) -> None:
        found = owner()
        if found is not None:
            function(found, number)

    return hook


def zero_of_padding(pads: Callable[[], bool]) -> Callable[[Tensor], Tensor | None]:
    """A hook on a parameter that sets gradients to 0 while ``pads()`` is true (a padding micro-batch). ``pads`` must
    keep nothing alive."""

    def hook(grad: Tensor) -> Tensor | None:
        return torch.zeros_like(grad) if pads() and grad is not None else None

    return hook


def refuse_ungathered(name: str, gathers: Callable[[nn.Module], None]) -> Any:
    """A pre-hook for a module inside a unit. It refuses a call that did not come through the unit, which gathers the
    parameters (torch's own error speaks of mixed tensors in an operator), unless ``gathers`` can gather them now."""

    def before(module: nn.Module, _args: Any) -> None:
        if _is_cut(module):
            gathers(module)
            if _is_cut(module):
                raise UsageError(
                    f"a call of a part of the model, {type(module).__name__}, by itself",
                    why="its parameters are cut over the ranks, and gathered only while the model's own forward runs",
                    fix="call model(...) itself, not model.forward(...); for another method (model.encode) parallelize a module whose "
                    'forward calls it: sw.TaskModel(model, loss, forward=lambda model, batch: model.encode(batch["x"])), with '
                    "TrainStep(..., loss=None)",
                    name=name,
                )

    return before


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The modules in ``module``, itself included, of which a unit gathers parameters."""
    return [child for child in module.modules() if GATHERS in child.__dict__]


def gather_parts(parts: Iterable[nn.Module]) -> None:
    """Called before code is recomputed in a backward without its hooks: gathers the units of the parameters of ``parts``
    that are not gathered yet (the forward returned nothing that a gradient could reach first)."""
    for child in parts:
        if _is_cut(child):
            with unseen():  # selective checkpointing knows the operators of the first run, where this was not needed
                child.__dict__[GATHERS](child)


def _is_cut(module: nn.Module) -> bool:
    return any(isinstance(param, DTensor | StandIn) for param in module._parameters.values())
