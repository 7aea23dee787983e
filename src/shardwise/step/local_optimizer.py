"""Optimizers that step on the local tensors of DTensor parameters, without DTensor's dispatch.

A stock optimizer on DTensor parameters spends most of a small model's step in DTensor's dispatch, although an
elementwise update needs no communication: each shard's update is the shard of the update. :func:`local_optimizer`
lets the optimizer step on the plain local tensors; outside ``step`` its parameter groups and state are what the user
expects, keyed by the model's parameters, with DTensor values, so schedulers and checkpoint tools keep working.
"""

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch.dtensor import local_tensor
from shardwise._torch.optimizers import own_step_of, unhooked_step
from shardwise.config.keywords import public_call
from shardwise.errors import UnsupportedError
from shardwise.model.tensors import like_parameter, map_contained
from shardwise.parallel.plain_parts import ELEMENTWISE, is_elementwise
from shardwise.parallel.stale import refuse_no_optimizer, refuse_stale
from shardwise.parallel.step_checks import check_step, hooks_of, stepped_by, stepping
from shardwise.parallel.step_threads import threads_of_step

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


@public_call()
def local_optimizer(optim: Opt) -> Opt:
    """Makes an elementwise optimizer (such as AdamW or SGD) step on each rank's local shards; returns the same
    optimizer.

    Idempotent. No communication, no copy.

    Args:
        optim: an optimizer of the sharded model's parameters.

    Raises:
        UnsupportedError: an optimizer that is not known to be elementwise (Muon, LBFGS, Adafactor, your own): its
            update of a shard is not the shard of its update.
    """
    refuse_no_optimizer(optim, "local_optimizer")
    if not is_elementwise(optim):
        raise UnsupportedError(
            f"local_optimizer({type(optim).__name__})",
            why="it is not known to update each element by itself, so stepping on shards may give other numbers",
            fix=f"use one of {', '.join(cls.__name__ for cls in ELEMENTWISE)}, or step it as it is",
        )
    if has_own_step(optim):
        raise UnsupportedError(
            f"local_optimizer of a {type(optim).__name__} whose step was replaced on the object",
            why="its code would see each rank's shards as if they were whole parameters: a norm would be that of a part",
            fix="leave local_optimizer out: the step runs on the model's parameters as it is; or replace the step after local_optimizer(optim)",
        )
    if own_step_of(optim) is None:
        _LocalStep(optim).install()
    return optim


def has_own_step(optim: torch.optim.Optimizer) -> bool:
    """Whether the ``step`` of ``optim`` was replaced on the object, by code that does not call one made by :func:`local_optimizer`."""
    step = own_step_of(optim)
    return step is not None and not getattr(step, "_shardwise_local", False)


class _LocalStep:
    """Swaps the local shards into an optimizer before its ``step``, and the model's parameters back in after it."""

    def __init__(self, optim: torch.optim.Optimizer):
        self.optim = optim
        self._locals: dict[nn.Parameter, nn.Parameter] = {}
        self._local_state: dict[nn.Parameter, dict[str, Any]] = {}
        self._known: dict[nn.Parameter, dict[str, Any]] = {}  # user-visible state that the local state stands for
        self._shown_from: dict[nn.Parameter, dict[str, Any]] = {}  # the local state that it was made from

    def install(self) -> None:
        inner = self.optim.step

        def step(optim: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None:
                raise UnsupportedError(
                    "step(closure) on a local optimizer",
                    why="a closure runs forward and backward in the middle of the step, on parameters that are swapped out",
                    fix="run the window first, then call step() without a closure",
                )
            kinds = {kind for group in optim.param_groups for kind in set(map(type, group["params"]))}
            if not any(issubclass(kind, DTensor) for kind in kinds):
                return inner()
            # Hooks run here, around the swap: while the optimizer holds the shards, they would take them for whole parameters.
            refuse_stale(optim)
            with threads_of_step(stepped_by(optim)):
                check_step(optim)
                before, after = hooks_of(optim)
                optim._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's wrapper of the step notes
                for hook in before:
                    if hook(optim, (optim,), {}) not in (None, ((optim,), {})):
                        raise _other_arguments(hook)
                with stepping(optim):
                    result = self._run(unhooked_step(optim))
                for hook in after:
                    hook(optim, (optim,), {})
                return result

        step._shardwise_local = True  # type: ignore[attr-defined]
        if hasattr(inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optim.step = types.MethodType(step, self.optim)  # bound: a scheduler made later reads its __func__

    def _run(self, inner: Callable[[], Any]) -> Any:
        optim = self.optim
        shown, given = optim.state, [group["params"] for group in optim.param_groups]
        self._to_local(shown, given)
        swapped: Any = defaultdict(dict)
        swapped.update({self._locals[p]: state for p, state in self._local_state.items()})
        try:
            optim.state = swapped
            for group, params in zip(optim.param_groups, given, strict=True):
                group["params"] = [self._locals[p] for p in params]
            with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optim).__name__}.step"):
                return inner()
        finally:
            optim.state = shown
            for group, params in zip(optim.param_groups, given, strict=True):
                group["params"] = params
            self._to_shown(shown, given, swapped)

    def _to_local(self, shown: Any, given: list[list[nn.Parameter]]) -> None:
        for param in (p for params in given for p in params):
            shard, local = local_tensor(param), self._locals.get(param)
            if local is None or local.data_ptr() != shard.data_ptr() or local.shape != shard.shape:
                local = self._locals[param] = nn.Parameter(shard.detach(), requires_grad=param.requires_grad)
            local.grad = None if param.grad is None else local_tensor(param.grad)
            state = shown.get(param)
            if not state:  # never stepped, or removed by the user, as by loading a state from before the first step
                for kept in (self._local_state, self._known, self._shown_from):
                    kept.pop(param, None)
            elif not _same_values(state, self._known.get(param)):  # loaded or edited by the user
                self._local_state[param] = map_contained(lambda _, value: local_tensor(value), dict(state), "")
                self._known[param] = dict(state)

    def _to_shown(self, shown: Any, given: list[list[nn.Parameter]], swapped: Any) -> None:
        for param in (p for params in given for p in params):
            local = self._locals[param]
            local.grad = None
            state = swapped.get(local)
            if not state:
                continue
            self._local_state[param] = state
            # A DTensor is a view of the local tensor it was made from, so it is made again only if that tensor is
            # replaced: doing so at every step took an eighth of the step of a model with many small parameters.
            if not _same_values(state, self._shown_from.get(param)):
                shown[param] = {key: like_parameter(value, param) for key, value in state.items()}
                self._known[param], self._shown_from[param] = dict(shown[param]), dict(state)


def _other_arguments(hook: Callable[..., Any]) -> UnsupportedError:
    return UnsupportedError(
        f"a hook before an optimizer's step, {getattr(hook, '__name__', hook)}, that gives the step other arguments",
        why="the step of a local optimizer takes none",
        fix="let the hook change gradients, and return None",
    )


def _same_values(state: dict[str, Any], known: dict[str, Any] | None) -> bool:
    return known is not None and state.keys() == known.keys() and all(state[key] is known[key] for key in state)
