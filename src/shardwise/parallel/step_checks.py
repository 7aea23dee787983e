"""Checks made when an optimizer steps a sharded model, or its gradients are cleared: a loop without windows has no
other moment for them, and a window cannot know these faults otherwise.

Each fault lets the ranks drift apart, or trains something else, without an error: the module was changed after it was
sharded (a replaced head, a block unfrozen), the optimizer holds a parameter whose gradient is not summed over the ranks
(a loss's own), gradients of ``accumulate`` wait for the last micro-batch and are this rank's alone.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise._torch.dtensor import local_tensor
from shardwise._torch.optimizers import step_hooks, step_within
from shardwise.config.caller import level_of_caller
from shardwise.errors import UsageError
from shardwise.model.tensors import checksum
from shardwise.parallel.named_gradients import OwnGradients
from shardwise.parallel.other_shards import watch_optimizer
from shardwise.parallel.outside_parameters import note_stepped
from shardwise.parallel.plain_parts import ELEMENTWISE, is_elementwise, refuse_mixing_optimizer
from shardwise.parallel.runtime import Runtime
from shardwise.parallel.stale import refuse_stale, replaced_name
from shardwise.parallel.step_threads import HookedThreads

_watched: weakref.WeakSet[Runtime] = weakref.WeakSet()
_looked_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()
# Of optimizers that are not known to be elementwise, between the first step's hooks: name -> checksum of a shard.
_before_first: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()
_threads = HookedThreads()
_is_installed = False


class LastStep:
    """A gradient of a model that its optimizer last stepped with."""

    def __init__(self) -> None:
        self._gradient: tuple[weakref.ref[torch.Tensor], int] | None = None  # and its version

    def note(self, runtime: Runtime) -> None:
        params = (runtime.parameters[name] for name in runtime.trainable)
        grad = next((grad for param in params if (grad := param.grad) is not None), None)
        self._gradient = None if grad is None else (weakref.ref(grad), local_tensor(grad)._version)

    def was_with(self, grad: torch.Tensor) -> bool:
        """Whether it is that gradient, and nothing has written it since."""
        noted, version = self._gradient or (None, 0)
        return noted is not None and noted() is grad and local_tensor(grad)._version == version


def hooks_of(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    return step_hooks(optimizer, (check_step, refuse_stale, _refuse_still, _threads.end))


def watch_steps(runtime: Runtime) -> None:
    """Checks every optimizer step on parameters of ``runtime`` before it is done."""
    global _is_installed
    _watched.add(runtime)
    if not _is_installed:
        register_optimizer_step_pre_hook(check_step)
        register_optimizer_step_post_hook(_threads.end)
        register_optimizer_step_post_hook(_refuse_still)
        for cls in ELEMENTWISE:
            step_within(cls, stepping)
        _is_installed = True


def check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises UsageError for a step that would train wrongly; see the module docstring."""
    held = _held(optimizer)
    stepped = _stepped(held)
    if not stepped:
        note_stepped(optimizer, held)
        return
    if _looked_at.get(optimizer) != (ids := frozenset(held)):
        _refuse_strangers(optimizer, held)
        watch_optimizer(optimizer)
        _looked_at[optimizer] = ids
        if not is_elementwise(optimizer):
            _before_first[optimizer] = _values_of(stepped, held)
    for runtime in stepped:
        refuse_mixing_optimizer(runtime, optimizer)
        refuse_in_window(runtime, f"{type(optimizer).__name__}.step()", "take the step after the with block")
        refuse_unreduced(runtime, f"{type(optimizer).__name__}.step()")
        if not runtime.is_checked:
            runtime.check_unchanged()
        runtime.is_checked = False
        runtime.memory(LastStep).note(runtime)
        _warn_of_own(runtime, f"{type(optimizer).__name__}.step()")
        _count_write(runtime, held)
        while runtime.before_first_step:
            runtime.before_first_step.pop(0)()
    _threads.begin(stepped)


@contextlib.contextmanager
def stepping(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager: what is a part has torch's own class, for the step without its hooks. It refuses again after it, also after one
    that raised."""
    shown = {runtime.shown for runtime in _watched} - {None}
    with contextlib.ExitStack() as stack:
        for parts in (runtime.shown for runtime in stepped_by(optimizer)) if shown else ():
            if parts is not None:
                stack.enter_context(parts.stepping(optimizer))
        yield


def _values_of(stepped: list[Runtime], held: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checksums of the shards that an optimizer is to change: those with a gradient that is not 0."""
    return {
        name: checksum(local_tensor(param))
        for runtime in stepped
        for name, param in runtime.parameters.items()
        if id(param) in held and isinstance(param, DTensor) and param.grad is not None
        if bool(local_tensor(param.grad).any())
    }


def _refuse_still(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises UsageError if the first step of an optimizer of the user's own has changed no shard."""
    before = _before_first.pop(optimizer, None)
    if not before or all(group.get("lr") == 0 for group in optimizer.param_groups):
        return
    held = _held(optimizer)
    after = _values_of(_stepped(held), held)
    if all(bool(after.get(name) == value) for name, value in before.items()):
        raise UsageError(
            f"{type(optimizer).__name__}.step() that changes no parameter",
            why="what it writes is not this rank's shard, but a copy, such as p.full_tensor() gives: nothing would ever be trained",
            fix="change parameters in place, under torch.no_grad(): p.sub_(lr * p.grad), or p.data.sub_(lr * p.grad)",
            name=next(iter(before)),
        )


def watch_clears(runtime: Runtime) -> None:
    """Until :func:`end_clears`, ``zero_grad()`` of an optimizer or a module is refused where it would drop gradients of ``runtime`` that no
    ``.grad`` shows. A window, or micro-batches of ``accumulate``, are open for so long; otherwise torch's own methods are in place."""
    if not _torchs:
        for cls, held_by in _CLEARS:
            _torchs[cls] = cls.zero_grad
            cls.zero_grad = _checked(cls.zero_grad, held_by)
    _clearing.add(runtime)


def end_clears(runtime: Runtime) -> None:
    """Ends what :func:`watch_clears` began. May be called again."""
    _clearing.discard(runtime)
    while _torchs and not _clearing:
        cls, zero_grad = _torchs.popitem()
        cls.zero_grad = zero_grad


def _checked(zero_grad: Callable[..., None], held_by: Callable[[Any], Mapping[int, Any]]) -> Callable[..., None]:
    """``zero_grad`` of a class, which first asks the open windows of models whose gradients it would clear."""

    @torch.compiler.disable
    @functools.wraps(zero_grad)
    def call(owner: Any, set_to_none: bool = True) -> None:
        held = held_by(owner)
        for runtime in list(_clearing):
            if not held.keys().isdisjoint(map(id, runtime.parameters.values())):
                refuse_unreduced(runtime, f"{type(owner).__name__}.zero_grad()")
                if runtime.accumulation is not None:
                    runtime.accumulation.zero_grad(held, set_to_none)
        zero_grad(owner, set_to_none)

    return call


def refuse_in_window(runtime: Runtime, what: str, fix: str) -> None:
    """Raises UsageError if ``what``, which needs final gradients, is called inside a window of the model, or of another one."""
    gradients = runtime.accumulation
    if runtime.in_window or (gradients is not None and gradients.of == "another model" and gradients.has_begun):
        raise UsageError(
            f"{what} inside a window" + ("" if runtime.in_window else " of another model"),
            why="gradients are final when the window is left: until then those of other micro-batches, or of other ranks, are missing",
            fix=fix,
        )


def refuse_unreduced(runtime: Runtime, what: str) -> None:
    """Raises UsageError if ``what`` is called while gradients of ``accumulate`` wait for the last micro-batch."""
    gradients = runtime.accumulation
    if gradients is not None and gradients.of == "accumulate" and gradients.has_begun:
        raise UsageError(
            f"{what} before the last micro-batch of sw.accumulate has ended",
            why="gradients are summed over the ranks at the last micro-batch: those that are there now are this rank's alone",
            fix="call it after the block `with sw.accumulate(model, is_last=True):`, also where an epoch ends early",
        )


def stepped_by(optimizer: torch.optim.Optimizer) -> list[Runtime]:
    """Sharded models of which ``optimizer`` holds parameters."""
    return _stepped(_held(optimizer))


def _held(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    return {id(param): param for group in optimizer.param_groups for param in group["params"]}


def _owned(module: nn.Module) -> dict[int, torch.Tensor]:
    return {id(param): param for param in module.parameters()}


_CLEARS: tuple[tuple[Any, Callable[[Any], dict[int, torch.Tensor]]], ...] = (
    (torch.optim.Optimizer, _held),
    (nn.Module, _owned),
)
_torchs: dict[Any, Callable[..., None]] = {}  # class -> its own method, while another is in place
_clearing: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _stepped(held: Mapping[int, torch.Tensor]) -> list[Runtime]:
    """Sharded models with a parameter in ``held`` (id -> parameter), in one order on all ranks, which a set has not: each has exchanges."""
    found = (r for r in list(_watched) if not held.keys().isdisjoint(map(id, r.parameters.values())))
    return sorted(found, key=lambda runtime: runtime.number)


def _refuse_strangers(optimizer: torch.optim.Optimizer, held: Mapping[int, torch.Tensor]) -> None:
    known = {id(param) for runtime in _watched for param in runtime.parameters.values()}
    strange = next((param for key, param in held.items() if key not in known), None)
    if strange is not None and any(runtime.world.size > 1 for runtime in _watched):
        raise UsageError(
            f"{type(optimizer).__name__}.step() with a parameter of shape {tuple(strange.shape)} that no sharded model has",
            why="nothing sums its gradient over the ranks (a loss's own parameter, a module added later), so each rank would "
            "step it by its own",
            fix="put it in the model before parallelize: model = sw.TaskModel(model, loss); or step it by an optimizer of its own, by a sum over the "
            'ranks: p.grad = world.axis("loss").reduce(p.grad)',
            name=replaced_name(strange),
        )


def _count_write(runtime: Runtime, held: Mapping[int, torch.Tensor]) -> None:
    """Increments the version of stepped DTensors. A step over lists of tensors, or a fused one, does not, and a
    backward of a forward from before the step would be taken for one with the same values."""
    for param in runtime.dtensors:
        if id(param) in held and param.grad is not None and not param.is_inference():
            increment_version(param)


def _warn_of_own(runtime: Runtime, what: str) -> None:
    if not runtime.memory(OwnGradients).are_there:
        return
    runtime.forget(OwnGradients)
    warnings.warn(
        f"{what} after torch.autograd.grad of the model's parameters, and no backward since: what it gives is of this rank's data alone, and "
        "a step by it lets the ranks drift apart. Put it into param.grad inside `with sw.window(model, batches) as w:`, which sums it over the "
        "ranks, or call backward() there.",
        UserWarning,
        stacklevel=level_of_caller(),
    )
