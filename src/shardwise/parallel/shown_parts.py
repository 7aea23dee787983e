"""The parameters of which a rank has plain parts: they refuse to give numbers of a part while the user's code runs."""

import contextlib
import enum
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from shardwise._torch.autograd import without_subclasses
from shardwise._torch.modules import before_fan
from shardwise._torch.patches import patch
from shardwise.errors import UsageError
from shardwise.parallel.part_errors import PUT_BACK, PartOf
from shardwise.parallel.part_values import (
    MARK,
    OWN_FRAMES,
    Part,
    in_hook,
    mark_part,
    own_class,
    part_of,
    with_part,
    with_parts,
)
from shardwise.parallel.runtime import Runtime

_HOOKS = frozenset(
    f"register_{of}{name}"
    for of in ("", "module_")  # of one module, of all
    for name in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook", "backward_hook")
)


class State(enum.Enum):
    """Whose code runs."""

    SHOWN = enum.auto()  # the user's: parts are of classes that refuse
    FORWARD = enum.auto()  # the model's
    STEP = enum.auto()  # an optimizer's, or Shardwise's


class ShownParts:
    """The parameters of one model of which a rank has plain parts, and the classes that they have while the user's code runs."""

    def __init__(self, runtime: Runtime, axes: dict[str, str]):
        self._params, self._gathered = [], runtime.engine.gathered
        for name, axis in axes.items():
            param, whole = runtime.parameters[name], runtime.recipe.params[name].shape
            sizes = zip(param.shape, whole, strict=True)
            cuts = {i - len(whole): (here, all_) for i, (here, all_) in enumerate(sizes) if here != all_}
            if cuts:
                setattr(param, MARK, PartOf(weakref.ref(runtime), name, axis, "parameter", cuts))
                self._params.append((param, type(param), with_part(type(param))))
        self._outer: list[State] = []  # of each running forward: the state that it began in
        self._state = State.STEP
        self._set(State.SHOWN)

    def _set(self, state: State) -> State:
        """Returns the state before."""
        before, self._state = self._state, state
        if (state is State.SHOWN) != (before is State.SHOWN):
            for param, own, shown in self._params:
                param.__class__ = shown if state is State.SHOWN else own
        return before

    @contextlib.contextmanager
    def within(self, state: State) -> Iterator[None]:
        before = self._set(state)
        try:
            yield
        finally:
            self._set(before)

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """A hook of the user's runs in a forward or backward. What modules have gathered over dp is a part too."""
        gathered = [(whole, part) for whole, param in self._gathered() if (part := getattr(param, MARK, None))]
        with self.within(State.SHOWN):
            for whole, part in gathered:
                mark_part(whole, part)
            try:
                yield
            finally:
                for whole, _ in gathered:
                    whole.__class__ = own_class(type(whole))

    def torchs(self) -> contextlib.AbstractContextManager[None]:
        return self.within(State.STEP)

    def begin_forward(self, *_: Any) -> None:
        self._outer.append(self._set(State.FORWARD))

    def end_forward(self, *_: Any) -> None:
        self._set(self._outer.pop() if self._outer else State.SHOWN)

    @contextlib.contextmanager
    def stepping(self, optim: torch.optim.Optimizer) -> Iterator[None]:
        self._set(State.STEP)
        try:
            with without_subclasses():  # of gradients and state too
                yield
        finally:
            self.mark_state(optim)
            self._outer.clear()  # as after a forward that was interrupted, which calls no hook
            self._set(State.SHOWN)

    def mark_state(self, optim: torch.optim.Optimizer) -> None:
        for param, _, _ in self._params:
            for value in optim.state.get(param, {}).values():
                if isinstance(value, Tensor) and not isinstance(value, Part) and value.shape == param.shape:
                    mark_part(value, replace(getattr(param, MARK), what="state"))


def show_parts(runtime: Runtime, axes: dict[str, str]) -> None:
    """Makes parameters of ``runtime`` refuse, outside of forward, to give numbers of a part. ``axes``: their names, each with the
    axis over which it is cut."""
    if axes:
        shown = runtime.shown = ShownParts(runtime, axes)
        with_parts.update(dict.fromkeys((module for _, module in runtime.modules), shown))
        runtime.module.register_forward_pre_hook(shown.begin_forward, prepend=True)
        runtime.module.register_forward_hook(shown.end_forward, always_call=True)
        before_fan(_refuse_fan)
        for owner in (nn.Module, all_modules):
            for name, register in [*vars(owner).items()]:
                if name in _HOOKS and not hasattr(register, "_shardwise_shows"):
                    patch(
                        owner,
                        name,
                        _showing(register),
                        "a hook sees parts of parameters as code outside of forward does",
                    )


def _showing(register: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that registers hooks of modules; those of a model with parts see them as the user's code does, outside of forward."""

    @functools.wraps(register)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Hooks of another model, or of one that is not sharded yet.
        if args and isinstance(args[0], nn.Module) and args[0] not in with_parts:
            return register(*args, **kwargs)
        if not (sys._getframe(1).f_globals.get("__name__") or "").startswith(OWN_FRAMES):
            args = tuple(in_hook(x) if callable(x) and not isinstance(x, nn.Module) else x for x in args)
            kwargs = {name: in_hook(x) if name == "hook" else x for name, x in kwargs.items()}
        return register(*args, **kwargs)

    call._shardwise_shows = True  # type: ignore[attr-defined]
    return call


def _refuse_fan(tensor: Tensor) -> None:
    part = part_of(tensor)
    if part is not None:
        raise UsageError(
            f"an initialiser that counts the inputs and outputs of a parameter, which is cut over {part.axis}",
            why="each rank has a part of it, with fewer of them, so that its numbers would be too large",
            fix=f"initialise it where the model is made, before parallelize; or later its whole: {PUT_BACK}",
            name=part.name,
        )
