"""The oracle: the reference training run in one process, in plain torch, without any of our parallel code.

It runs the same micro-batches as all ranks together, in the same order, divides each loss sum by the window's count,
clips with torch's own function and steps the same optimizer. With the step it shares how a batch is counted,
how the model is called on it, and the seeds of what a forward draws; nothing else.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise._torch.modules import cast_floating
from shardwise.model.lift import LiftFloat32
from shardwise.model.names import canonical_generators
from shardwise.step.loss import counter_of, forward_of
from shardwise.step.step_state import StepState
from shardwise.world.rng import derive_seed, forked_streams, seed_torch

Batch = Mapping[str, Tensor]


def cast_batches(windows: Sequence[Sequence[Batch]], dtype: torch.dtype) -> list[list[Batch]]:
    """Casts the floating tensors of batches to ``dtype``, complex ones to the complex dtype of that precision, like the
    module; others stay as they are."""

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (
            value.to(dtype.to_complex())
            if value.is_complex()
            else value.to(dtype)
            if value.is_floating_point()
            else value
        )

    return [
        [
            {name: cast(value) for name, value in batch.items()} if isinstance(batch, Mapping) else batch
            for batch in window
        ]
        for window in windows
    ]


@dataclass(frozen=True)
class Task:
    """A short training run, as data that can be sent to another process; it is run sharded and in one process.

    Attributes:
        build: makes the module; torch, numpy and Python are seeded with ``seed`` for it.
        windows: per step, the micro-batches of all ranks in global order.
        loss: ``loss(output, batch)`` -> sum, or a mapping of sums; None: what ``forward`` returns is the sum.
        count: ``count(batch)`` -> valid tokens; None: the module's own ``count``, else valid labels.
        forward: ``forward(model, batch)`` -> output; without a loss the default is ``model(batch)``.
        optimizer: "sgd" (with momentum), "adamw", "adafactor", or a callable taking parameters.
        max_grad_norm: None: no clipping.
        norm_type: p of that norm.
        clip_grad_value: each element is clamped to [-value, value], after the norm; None: it is not.
        fused: as in ``TrainStep``, of the ranks alone.
        dtype: what the module is cast to, its complex tensors to the complex dtype of that precision; with float64,
            code that asks for float32 computes in float64 too.
    """

    build: Callable[[], nn.Module]
    windows: Sequence[Sequence[Batch]]
    loss: Callable[[Any, Batch], Any] | None
    count: Callable[[Batch], Any] | None
    forward: Callable[[nn.Module, Batch], Any]
    optimizer: Any = "sgd"
    max_grad_norm: float | None = None
    norm_type: Any = 2.0
    clip_grad_value: float | None = None
    dtype: torch.dtype = torch.float64
    lr: float = 0.05
    seed: int = 0
    fused: bool | str = False

    def make(self, seed: int | None = None) -> nn.Module:
        """Builds the module with its initial values, in the task's dtype."""
        with _drawing_from(self.seed if seed is None else seed):
            return cast_floating(self.build(), self.dtype)

    def run_once(self, model: nn.Module) -> Any:
        """Runs ``model`` on the first micro-batch; returns its output."""
        return forward_of(self.loss, self.forward)(model, self.windows[0][0], StepState(1))

    def result(self, model: nn.Module, batch: Batch, state: StepState) -> Any:
        """Runs ``model`` and loss on a micro-batch in the step of ``state``: returns a sum, or a mapping of sums."""
        output = forward_of(self.loss, self.forward)(model, batch, state)
        return output if self.loss is None else self.loss(output, batch)

    def lifted(self) -> contextlib.AbstractContextManager:
        """Within: float64 from end to end, if that is the task's dtype."""
        return LiftFloat32() if self.dtype == torch.float64 else contextlib.nullcontext()


@contextlib.contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Within: every generator that a constructor may draw from is seeded with ``seed``. Python's and numpy's are
    restored afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@dataclass
class StepRecord:
    """The results of one step in one process: loss, norm, gradients, parameters and buffers by name; full tensors."""

    loss: float
    grad_norm: float
    num_tokens: float
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    in_training: bool = True


def make_optimizer(task: Task, params: Any) -> torch.optim.Optimizer:
    """Builds the task's optimizer; the same implementation on both sides."""
    if task.optimizer == "sgd":
        return torch.optim.SGD(params, lr=task.lr, momentum=0.9)
    if task.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=task.lr * 0.1, weight_decay=0.1)
    if task.optimizer == "adafactor":
        return torch.optim.Adafactor(params, lr=task.lr * 0.1, weight_decay=0.1)
    return task.optimizer(params)


def run_oracle(task: Task, *, otherwise: bool = False) -> list[StepRecord]:
    """Trains ``task`` in one process; returns a record per optimizer step.

    Args:
        task: the run.
        otherwise: add the same sums in another order (micro-batches in reverse, divided at the end instead of before
            backward): the difference of the two results shows how much is rounding.
    """
    model = task.make()
    optim = make_optimizer(task, [p for p in model.parameters() if p.requires_grad])
    return [_step(task, model, optim, number, otherwise) for number in range(len(task.windows))]


def _step(task: Task, model: nn.Module, optim: torch.optim.Optimizer, number: int, otherwise: bool) -> StepRecord:
    window = list(enumerate(task.windows[number]))
    count = task.count or counter_of(model, None, None)
    tokens = sum(float(count(batch)) for _, batch in window)
    total = 0.0
    divisor = tokens or 1.0
    for index, batch in reversed(window) if otherwise else window:
        # What a forward draws (noise, the times of a diffusion) depends on the step and the micro-batch, on the ranks too.
        seed = derive_seed(task.seed, "forward", number, index)
        draws = forked_streams(seed, None, canonical_generators(model))
        with task.lifted(), draws:
            result = task.result(model, batch, StepState(number + 1, index))
        loss = result["loss"] if isinstance(result, Mapping) else result
        (loss if otherwise else loss / divisor).backward()
        total += float(loss.detach())
    params = dict(model.named_parameters())
    if otherwise:
        for param in params.values():
            param.grad = None if param.grad is None else param.grad / divisor
    grads = [p.grad for p in params.values() if p.grad is not None]
    if task.max_grad_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(params.values(), task.max_grad_norm, norm_type=task.norm_type)
    else:
        norm = torch.nn.utils.get_total_norm(grads, norm_type=task.norm_type)
    if task.clip_grad_value is not None:
        torch.nn.utils.clip_grad_value_(params.values(), task.clip_grad_value)
    kept = {name: None if p.grad is None else p.grad.clone() for name, p in params.items()}
    if tokens:  # a step on nothing is none
        optim.step()
    optim.zero_grad()
    return StepRecord(
        loss=total / divisor,
        grad_norm=float(norm),
        num_tokens=tokens,
        grads=kept,
        params={name: p.detach().clone() for name, p in params.items()},
        buffers={name: b.clone() for name, b in model.named_buffers()},
        in_training=model.training,
    )
