"""``TrainStep``: one optimizer step on the micro-batches of a window; all ranks take every decision together."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.spans import span
from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.data.batch import MicroBatch
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.model.calling import call, methods_called
from shardwise.model.module_state import ModuleState
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.plain_parts import is_elementwise, refuse_mixing_optimizer
from shardwise.state.given import Given
from shardwise.step.argument_checks import (
    facts_of_schedule,
    refuse_other_state,
    refuse_parameters,
    refuse_torch_loss,
    refuse_unfit,
    warn_of_left_out,
)
from shardwise.step.clip import Clipping, NormType
from shardwise.step.equal_losses import entries_of_losses, refuse_other_losses
from shardwise.step.forward import sums_on
from shardwise.step.fused import fused_forward
from shardwise.step.local_optimizer import has_own_step, local_optimizer
from shardwise.step.loss import Batch, Loss, counter_of, forward_of, next_token_loss, refuse_uncallable, with_count
from shardwise.step.loss_check import LossCheck
from shardwise.step.loss_errors import agreed_problem
from shardwise.step.mode import EvalMode
from shardwise.step.no_gradient import no_gradient, nothing_of
from shardwise.step.norm import GradientNorm
from shardwise.step.same_data import SeenData
from shardwise.step.scale import LossScale
from shardwise.step.schedule import sequential
from shardwise.step.settings import agree_on_settings, digest_of_settings
from shardwise.step.step_errors import nonfinite, nothing_counted, refuse_old_gradients
from shardwise.step.step_state import StepState
from shardwise.step.token_count import SeenLabels
from shardwise.step.window import Window
from shardwise.step.work import Work
from shardwise.world.agreement import Entry


@dataclass(frozen=True)
class StepOutput:
    """The result of an optimizer step: loss, gradient norm, tokens, metrics; equal on every rank.

    Attributes:
        step: number of windows run so far, including this one.
        loss: sum over all ranks' valid tokens divided by their number (nats per token for a cross entropy); NaN where
            there are none.
        grad_norm: norm of the full model's gradient before clipping, of the step's ``norm_type``.
        num_tokens: valid tokens of the window, over all ranks.
        skipped: True if the step was not taken: something was not finite, or no token was valid.
        metrics: the other entries of the loss, divided in the same way.
        loss_scale: what the loss was multiplied by for float16; None without a scaler.
        data_s: seconds that ranks waited for the Loader to give them the window, on average over the ranks; 0 for other
            data.
    """

    step: int
    loss: float
    grad_norm: float
    num_tokens: int | float
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    data_s: float = 0.0


class TrainStep:
    """One optimizer step per call, with gradient accumulation, gradient clipping, loss scaling and a scheduler. It owns
    the step count, the scheduler and the gradient scaler. All ranks must build and call it in the same way.

    ``step(window)`` counts the window's tokens over all ranks, runs forward and backward of each micro-batch on
    ``loss_sum / tokens`` (times the loss scale), sums gradients over ranks, measures the norm, unscales, clips, and
    steps if everything is finite; then the scheduler, then ``zero_grad``. Elementwise optimizers step on local shards
    (:func:`local_optimizer`).

    Args:
        model: from ``parallelize``.
        optim: built from the model's parameters after ``parallelize``.
        loss: ``loss(output, batch)`` -> sum over valid tokens, 0-dim, or a mapping of such sums with the key
            ``"loss"``; :func:`model_loss`: the mean that the model computes itself; None: the forward returns the sum: the
            module's own, which takes the batch (:class:`TaskModel`), or ``forward``.
        count: ``count(batch)`` -> valid tokens; default ``loss.count``, or without a loss the model's own ``count``, else
            labels that are not -100.
        forward: ``forward(model, batch)`` -> output, how to call the model on a batch; or
            ``forward(model, batch, state)``, with the step's :class:`StepState`.
        scheduler: stepped after each step that was taken.
        max_grad_norm: gradients are scaled down so that their norm is at most this; None only measures it.
        norm_type: p of the norm, above 0; ``inf`` or ``"inf"`` for the largest element.
        clip_grad_value: each element of a gradient is clamped to [-value, value], after ``max_grad_norm``; None: it is
            not. These three are attributes too: a loop may set them, to the same values on all ranks, for the next
            step.
        fused: True: the cross entropy is computed where the head of the model is called, some positions at a time, and the
            logits are never held; over ``tp`` each rank has those of its part of the vocabulary
            (:func:`linear_cross_entropy`). With ``loss=next_token_loss`` only. The head is the one that a Hugging Face
            model names, or the linear layer with as many outputs as an embedding has rows; or else its name is given.
        scaler: a ``torch.amp.GradScaler``; None: a new one if the model computes in float16, else none. A step whose
            gradients overflow under it is skipped on all ranks, and the scale backs off; ``on_nonfinite`` is for the
            rest: a loss that is not finite, or gradients that are not finite at a scale of 1 or below.
        on_nonfinite: ``"raise"`` an error or ``"skip"`` the step on all ranks, when the loss or a gradient is NaN or
            infinite; parameters, optimizer, scheduler and buffers stay as they were.

    Raises (by the call):
        NonFiniteError: with the ranks and the first parameter that is not finite.
        RankError: another rank was lost or disagrees.
        ConfigError: a loss that takes a mean or returns no 0-dim sum, or a batch in which nothing can be counted.
    """

    @public_call()
    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        *,
        loss: Loss | None = next_token_loss,
        count: Callable[[Batch], Any] | None = None,
        forward: Callable[..., Any] = call,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        norm_type: NormType = 2.0,
        clip_grad_value: float | None = None,
        fused: bool | str = False,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: str = "raise",
    ):
        if on_nonfinite not in ("raise", "skip"):
            raise ConfigError(
                f"on_nonfinite={on_nonfinite!r}", why="there is no such choice", fix='use "raise" or "skip"'
            )
        clipping = Clipping(max_grad_norm, norm_type, clip_grad_value)
        refuse_uncallable(loss=loss, count=count, forward=forward)
        refuse_torch_loss(loss)
        refuse_parameters(loss)
        runtime = runtime_of(model)
        refuse_unfit(runtime, optim, scheduler)
        warn_of_left_out(runtime, optim)
        clipping.refuse_unfit(runtime)
        self.model, self.optim, self.scheduler = model, optim, scheduler
        loss = with_count(loss, count)
        self.loss, self.forward = loss, forward_of(loss, forward)
        self.count = counter_of(model, loss, count)
        # A forward of the user's own may write parameters, also through .data, which shows in no version.
        self._gathers_once = forward is call
        if fused:
            self.loss, self.forward = None, fused_forward(model, fused, loss, self.forward)
        # Read at every step: a loop may change them between steps.
        self.max_grad_norm, self.norm_type, self.clip_grad_value = max_grad_norm, norm_type, clip_grad_value
        self.on_nonfinite = on_nonfinite
        self.num_steps = self.num_skipped = 0
        # The scheduler's `last_epoch` after this object stepped it; None: this object has not stepped it.
        self._scheduled: int | None = None
        self._has_warned_of_schedule = False
        self._runtime: Runtime = runtime
        self.eval_mode = EvalMode(is_main=runtime.world.is_main)
        runtime.forget(SeenLabels, SeenData)  # another step may be given other data
        self._marks_parts = True  # the loss may run backwards of its own, of parts of the model
        self._scale = LossScale(runtime, optim, scaler)
        self._check = LossCheck(runtime, self.loss, self.count, self.forward, given=forward)
        self._before_step = methods_called(model, "pre_optimizer_step")
        self._after_step = methods_called(model, "post_optimizer_step")
        agree_on_settings(self)
        self.given = Given(runtime, optim, scheduler, self.scaler)
        refuse_mixing_optimizer(runtime, optim)
        if is_elementwise(optim) and not has_own_step(optim):
            local_optimizer(optim)

    def __call__(self, window: Iterable[Batch]) -> StepOutput:
        clipping = self.clipping
        clipping.refuse_unfit(self._runtime)
        norm_of = GradientNorm(self._runtime, clipping.p, whole_after=self._runtime.replicated)
        refuse_old_gradients(self._runtime)
        self._warn_of_second_schedule()
        self.eval_mode.warn_once(self.model)
        if self._runtime.step == 0:
            self.given.take()
        with Window(
            self.model,
            window,
            count=self.count,
            trains=True,
            gathers_once=self._gathers_once,
            marks_parts=self._marks_parts,
        ) as w:
            may_skip = self.on_nonfinite == "skip" or self.scaler is not None
            state = self._runtime.module_state() if may_skip else None
            sums, problem = self._forward_backward(w)
            w.complete()
            # The settings are part of the entry's name: ranks that clip differently are refused, or replicas would
            # drift apart.
            norm_entry = f"norm ({clipping})"
            agreed = w.finish({**self._entries(sums, problem), norm_entry: norm_of.entry()})
            self._scale.refuse_other_models(w)
            if w.has_late:
                place = f"step {self.num_steps + 1}, the norm with gradients that came late"
                agreed |= self._runtime.world.agreement.sum({norm_entry: norm_of.entry()}, place)
        self._marks_parts = self._marks_parts and w.has_others
        if float(agreed["problem"]):
            self._drop_gradients()
            raise agreed_problem(self._runtime, problem)
        if not self._runtime.world.agreement.all_same(agreed["settings"]):
            self._drop_gradients()
            agree_on_settings(self)
        self._check.agree(sorted(sums), agreed["told"])
        self._refuse_other_losses(agreed)
        if float(agreed["unclear"]):
            self._try_loss(w)
        else:
            self._check.forget()
        means = {name: float(agreed[f"sum of {name}"]) / w.num_tokens for name in sorted(sums)}
        scale = self._scale.agree(agreed)
        norm, loss = float(norm_of.finish(agreed[norm_entry])) / (scale or 1.0), means.pop("loss")
        if not w.num_valid and loss and math.isfinite(loss):
            self._drop_gradients()
            raise nothing_counted(loss)
        self.num_steps += 1
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if not is_finite:
            self._refuse_step(norm, loss, sums["loss"], state)
        else:
            self._agree_on_buffers(w)
            if w.num_valid:
                self._step(clipping, norm)
            else:  # the mean over nothing is no figure: 0 would be the best of all
                self._drop_gradients()
                self.num_skipped += 1
                loss, means = math.nan, dict.fromkeys(means, math.nan)
        self._scale.update(is_finite=is_finite)
        is_skipped = not (is_finite and w.num_valid)
        return StepOutput(self.num_steps, loss, norm, w.num_valid, is_skipped, means, scale, w.waited_s)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler in use; None where nothing is scaled."""
        return self._scale.scaler

    @property
    def clipping(self) -> Clipping:
        """The gradient clipping now: the attributes ``max_grad_norm``, ``norm_type`` and ``clip_grad_value``.

        Raises:
            ConfigError: one of them has been set to something that is not a number above 0.
        """
        return Clipping(self.max_grad_norm, self.norm_type, self.clip_grad_value)

    def state_dict(self) -> dict[str, Any]:
        """State dict for a checkpoint: step counts (which also place the random streams), scheduler, scaler. Equal on
        every rank. Without the state of model and optimizer, which have their own."""
        parts = {"scheduler": self.scheduler, "scaler": self.scaler}
        facts = {} if self.scheduler is None else facts_of_schedule(self._runtime, self.optim, self.scheduler)
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "num_windows": self._runtime.step,
            **{name: part.state_dict() for name, part in parts.items() if part is not None},
            **facts,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises what :meth:`load_state_dict` would raise; changes nothing."""
        refuse_other_state(self.state_dict(), state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state dict of :meth:`state_dict`. All ranks must call it, with the same state.

        Raises:
            CheckpointError: the state is of a step with another scheduler or scaler, of parameter groups in another
                order (a scheduler knows them by number), or of something else. Nothing has changed then.
        """
        self.check_state_dict(state)
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self._runtime.step = state["num_windows"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            self._scheduled = None
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _forward_backward(self, w: Window) -> tuple[dict[str, Tensor], ShardwiseError | None]:
        """Forward and backward of every micro-batch of a window. Returns this rank's detached sums (float64, on their
        device, which need not have computed them yet), and an error of the loss that all ranks must raise."""
        work = Work(w, self._sums_of, self._scale.scaled)
        self._check.begin(self.num_steps, w.num_ignored)
        (self._runtime.schedule or sequential)(work)
        return work.totals, work.detached

    def _sums_of(self, batch: MicroBatch) -> tuple[dict[str, Tensor], ShardwiseError | None]:
        """The sums of the loss on a micro-batch, tried where that is due, and the error where they have no gradient."""
        state = StepState.at(self.num_steps + 1, batch)
        output, sums = sums_on(self._runtime, self.forward, self.loss, batch, state)
        self._check.see(output, batch, sums, counts=not batch.padding)
        if sums["loss"].requires_grad:
            return sums, None
        detached = no_gradient(self._runtime)
        sums["loss"] = sums["loss"] + nothing_of(output, detached)
        return sums, detached

    def _try_loss(self, w: Window) -> None:
        """Settles by runs of the model what the loss alone does not tell. Called before the optimizer steps."""
        try:
            self._check.run(w.batches, StepState(self.num_steps + 1))
        except ShardwiseError:
            self._drop_gradients()
            raise

    def _refuse_other_losses(self, agreed: Mapping[str, Tensor]) -> None:
        try:
            refuse_other_losses(self._runtime, agreed)
        except ShardwiseError:
            self._drop_gradients()
            raise

    def _entries(self, sums: Mapping[str, Tensor], problem: ShardwiseError | None) -> dict[str, Entry]:
        """What the step adds to the window's second exchange between ranks."""
        counts = self._runtime.world.counts
        return {
            "problem": float(problem is not None),
            **self._check.entries(sorted(sums)),
            # The loop, its own scheduler or a resumed state may have changed them on one rank.
            "settings": self._runtime.world.agreement.same(digest_of_settings(self.optim)),
            **self._scale.entries(),
            # An entry per metric: a rank with other metrics is named in the error.
            **{f"sum of {name}": value if counts else torch.zeros(()) for name, value in sums.items()},
            **entries_of_losses(self._runtime, sums),
        }

    def _step(self, clipping: Clipping, norm: float) -> None:
        self._scale.unscale()
        clipping.apply(self._runtime, norm)
        for before in self._before_step:
            before()
        with span("step of", type(self.optim).__name__):
            self.optim.step()
        for after in self._after_step:
            after()
        if self.scheduler is not None:
            self.scheduler.step()
            self._scheduled = getattr(self.scheduler, "last_epoch", None)
        self._drop_gradients()

    def _warn_of_second_schedule(self) -> None:
        """Warns of a loop that steps the scheduler too: learning rates would change faster than was set."""
        before, self._scheduled = self._scheduled, None
        if before is None or (now := self.scheduler.last_epoch) <= before or self._has_warned_of_schedule:
            return
        self._has_warned_of_schedule = True
        warnings.warn(
            f"the scheduler {type(self.scheduler).__name__} was stepped {now - before} times since the last step, and TrainStep(scheduler=...) "
            "steps it itself: learning rates pass faster than was set. Leave out scheduler.step(), or leave scheduler= out of TrainStep.",
            stacklevel=level_of_caller(),
        )

    def _agree_on_buffers(self, w: Window) -> None:
        try:
            w.agree_on_buffers(f"step {self.num_steps}")
        except ShardwiseError:
            self._drop_gradients()
            raise

    def _refuse_step(self, norm: float, loss: float, own_loss: Tensor, state: ModuleState | None) -> None:
        """Raises or skips a step that is not finite; everything stays as it was. All ranks get here or none, since the
        numbers are equal."""
        if self.on_nonfinite == "raise" and not self._scale.explains(loss):
            scale = None if self.scaler is None else self._scale.value
            error = nonfinite(self._runtime, self.num_steps, loss, norm, own_loss, self.clipping.p, scale)
            self._drop_gradients()
            raise error
        self._drop_gradients()
        if state is not None:
            state.restore()
        self.num_skipped += 1

    def _drop_gradients(self) -> None:
        with self._runtime.torchs_classes():
            for param in self._runtime.parameters.values():
                param.grad = None
