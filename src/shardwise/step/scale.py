"""Loss scaling for float16: the loss is multiplied by a scale, so that small gradients do not underflow, and gradients
are divided by it before they are clipped.

torch's own ``GradScaler`` holds the scale and the rule by which it grows and backs off. Two things are done here:
gradients are divided shard by shard (torch's ``unscale_`` fails where DTensors are mixed with plain tensors, such as
0-dim parameters), and all ranks together decide whether a gradient is infinite and report it to the scaler, so that
every rank skips the same steps.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise._torch.operators import foreach_scale
from shardwise._torch.scaler import is_unscaled, scale_of, tell_scaler
from shardwise.config.keywords import public_call
from shardwise.errors import UnsupportedError, UsageError
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.runtime import runtimes_in_use
from shardwise.parallel.stale import refuse_no_optimizer
from shardwise.parallel.step_checks import refuse_in_window, refuse_unreduced
from shardwise.step.norm import norm_power_sum
from shardwise.step.window import Window


class LossScale:
    """The loss scaling of a :class:`~shardwise.step.step.TrainStep`; without a scaler it does nothing.

    Args:
        runtime: of the model.
        optim: the optimizer whose steps are scaled.
        scaler: a ``torch.amp.GradScaler``; None: a new one if a trained parameter is computed in float16, else none.

    Attributes:
        value: the scale that the loss of this window was multiplied by, set by :meth:`agree`; None without a scaler.

    Raises:
        UsageError: ``scaler`` is another object.
        UnsupportedError: parameters are stored in float16.
    """

    def __init__(self, runtime: Runtime, optim: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None):
        if scaler is None and computes_half(runtime):
            scaler = torch.amp.GradScaler(runtime.world.device.type)
        _refuse_no_scaler(scaler)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.value: float | None = None
        self._runtime, self._optim = runtime, optim
        if self.scaler is not None:
            _refuse_half_storage(runtime)

    def entries(self) -> dict[str, Tensor]:
        """For the exchange before a step: the scale, which a device may hold."""
        if self.scaler is None:
            return {}
        return {"loss scale": self._runtime.world.agreement.of_main(scale_of(self.scaler))}

    def agree(self, summed: Mapping[str, Tensor]) -> float | None:
        """Takes :attr:`value` from what came of :meth:`entries`."""
        self.value = None if self.scaler is None else float(summed["loss scale"])
        return self.value

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)  # type: ignore[return-value]

    def unscale(self) -> None:
        if self.value is not None:
            _divide(list(self._runtime.gradients().values()), self.value)

    def refuse_other_models(self, window: Window) -> None:
        """Raises UnsupportedError, on every rank, for a scaled loss that came to another model too, in a window that has ended."""
        if self.scaler is not None and window.reached_others:
            raise UnsupportedError(
                "a TrainStep with a gradient scaler, whose loss comes to another model too",
                why="its gradients are of the loss times the scale, and this step divides, clips and judges those of its own model: the other "
                "model's optimizer would step with them",
                fix="write the loop with sw.window, and for each optimizer sw.unscale_gradients_(model, optim, scaler) before scaler.step(optim); "
                'or train without a scaler: precision="bf16"',
            )

    def update(self, *, is_finite: bool) -> None:
        """Lets the scale grow or back off after a step, taken or skipped; the same on every rank."""
        if self.scaler is not None:
            tell_scaler(self.scaler, self._optim, found_inf=not is_finite)
            self.scaler.update()

    def explains(self, loss: float) -> bool:
        """Whether the scale may be the cause of gradients that are not finite, so that a smaller one helps: not if the
        loss itself is not finite, and not at a scale of 1 or below."""
        return self.value is not None and self.value > 1 and math.isfinite(loss)


@public_call()
def unscale_gradients_(model: nn.Module, optim: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """Replaces ``scaler.unscale_(optim)`` in your own training loop: divides the gradients of the optimizer's
    parameters, of this model and of others, by the loss scale. All ranks must call it, after the window and before clipping.

    Args:
        model: from ``parallelize``.
        optim: the optimizer that ``scaler.step`` is called with.
        scaler: torch's, which has scaled the losses of the window.

    Returns:
        whether these are finite on every rank; if not, ``scaler.step(optim)`` skips the step on all of them. With several optimizers of
        a model clip nothing then: the norm of all of its gradients is not finite either.

    Raises:
        UsageError: it is called twice for one step, or nothing was scaled.

    Example:
        >>> with sw.window(model, batches) as w:  # doctest: +SKIP
        ...     for b in w:
        ...         scaler.scale(loss(model(b["input_ids"]), b) / w.num_tokens).backward()
        >>> sw.unscale_gradients_(model, optim, scaler)  # doctest: +SKIP
        >>> sw.clip_grad_norm_(model, 1.0); scaler.step(optim); scaler.update(); optim.zero_grad()  # doctest: +SKIP
    """
    runtime = runtime_of(model)
    _refuse_no_scaler(scaler)
    refuse_no_optimizer(optim, "unscale_gradients_")
    if not scaler.is_enabled():
        return True
    refuse_in_window(runtime, "unscale_gradients_", "unscale after the with block")
    refuse_unreduced(runtime, "unscale_gradients_")
    _refuse_half_storage(runtime)
    if is_unscaled(scaler, optim):
        raise UsageError(
            "unscale_gradients_ called twice for one step",
            why="the gradients were divided by the scale already, and would be too small",
            fix="call it once after each window; scaler.update() after the step begins the next",
        )
    grads = [grad for grad in _gradients_of(optim, runtime) if grad.numel()]
    _divide(grads, scaler.get_scale())
    largest = norm_power_sum(grads, math.inf)  # not finite where one of them is not
    summed = runtime.world.agreement.sum({"largest": largest}, "unscaling gradients")
    is_finite = math.isfinite(float(summed["largest"]))
    tell_scaler(scaler, optim, found_inf=not is_finite)
    return is_finite


def _gradients_of(optim: torch.optim.Optimizer, runtime: Runtime) -> list[Tensor]:
    """This rank's gradients of an optimizer's parameters: of the model, of others that are sharded, and of none."""
    held = {id(param): param for group in optim.param_groups for param in group["params"]}
    grads: list[Tensor] = []
    for each in runtimes_in_use():
        if each.world is not runtime.world:
            continue
        if each is not runtime and held.keys() & {id(param) for param in each.parameters.values()}:
            refuse_in_window(each, "unscale_gradients_", "unscale after the with block")
            refuse_unreduced(each, "unscale_gradients_")
            _refuse_half_storage(each)
        found = each.gradients()
        grads += [
            found[name]
            for name, param in each.parameters.items()
            if held.pop(id(param), None) is not None and name in found
        ]
    # Of parameters of no model of ours: torch's own FSDP has DTensors.
    others = (local_tensor(param.grad) for param in held.values() if param.grad is not None)
    return grads + [grad._values() if grad.is_sparse else grad for grad in others]


def _divide(grads: list[Tensor], scale: float) -> None:
    grads = [grad for grad in grads if grad.numel()]
    if grads:
        foreach_scale(grads, 1.0 / scale)


def computes_half(runtime: Runtime) -> bool:
    """Whether a trained parameter is used in float16 computations, so that its gradients may underflow."""
    return any(param.trainable and param.compute == "float16" for param in runtime.recipe.params.values())


def _refuse_no_scaler(scaler: Any) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(
            f"scaler={getattr(scaler, '__name__', repr(scaler))}",
            why="it is not a torch.amp.GradScaler object",
            fix='pass torch.amp.GradScaler("cuda", init_scale=2.0**16), or leave it out: precision="fp16" makes one',
        )


def _refuse_half_storage(runtime: Runtime) -> None:
    params = runtime.recipe.params.items()
    name = next((name for name, param in params if param.trainable and param.storage == "float16"), None)
    if name is not None:
        raise UnsupportedError(
            "a trained parameter stored in float16, with a gradient scaler",
            why="its gradient is float16 too: divided by the scale it underflows, which scaling was to prevent",
            fix='store it in float32 and compute in float16: precision="fp16"; or train without a scaler: '
            "scaler=torch.amp.GradScaler(enabled=False)",
            name=name,
        )
