"""Gradient clipping, by the norm of all gradients together and by the value of each element; exact under every
layout."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from shardwise._torch.operators import foreach_scale
from shardwise.config.keywords import public_call
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.step_checks import refuse_in_window, refuse_unreduced
from shardwise.step.norm import GradientNorm

NormType = float | Literal["inf"]


@dataclass(frozen=True)
class Clipping:
    """The gradient clipping of a step, applied before the optimizer's update. With both limits the norm is clipped
    first: it is measured once, of the unclipped gradients, and clamping elements afterwards only makes it smaller, so
    both limits hold.

    Args:
        max_grad_norm: the norm of all gradients is scaled down to this; None: it is only measured.
        norm_type: p of that norm, above 0; ``inf`` or ``"inf"`` for the largest element.
        clip_grad_value: each element is clamped to [-value, value], after the norm; None: it is not.

    Raises:
        ConfigError: a limit or p is not a number above 0.
    """

    max_grad_norm: float | None = None
    norm_type: NormType = 2.0
    clip_grad_value: float | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not _is_limit(self.max_grad_norm):
            raise ConfigError(
                f"max_grad_norm={self.max_grad_norm!r}",
                why="it is a number above 0",
                fix="use 1.0, or None for no clipping",
            )
        if self.clip_grad_value is not None and not _is_limit(self.clip_grad_value):
            raise ConfigError(
                f"clip_grad_value={self.clip_grad_value!r}",
                why="it is a number above 0: each element is clamped to [-value, value]",
                fix="use 1.0, or None for no clipping by value",
            )
        p_of(self.norm_type)

    @property
    def p(self) -> float:
        return p_of(self.norm_type)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that must be equal on every rank."""
        limits = {"max_grad_norm": self.max_grad_norm, "clip_grad_value": self.clip_grad_value}
        return {"norm_type": self.p} | {name: None if x is None else float(x) for name, x in limits.items()}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.facts.items())

    def refuse_unfit(self, runtime: Runtime) -> None:
        """Raises UnsupportedError if ``clip_grad_value`` is set and a trained parameter is complex."""
        if self.clip_grad_value is not None:
            _refuse_complex(runtime, f"clip_grad_value={self.clip_grad_value}")

    def apply(self, runtime: Runtime, norm: float) -> None:
        """Clips a model's gradients. ``norm``: their norm of type ``norm_type`` over all ranks. No communication."""
        if self.max_grad_norm is not None:
            scale_gradients(runtime, norm, float(self.max_grad_norm))
        if self.clip_grad_value is not None:
            _clamp(runtime, float(self.clip_grad_value))


@public_call(
    {
        "foreach": "leave it out: the norm is taken over all ranks",
        "error_if_nonfinite": "look at the norm that is returned",
    }
)
def clip_grad_norm_(model: nn.Module, max_norm: float, *, norm_type: NormType = 2.0) -> Tensor:
    """Scales all gradients so that their norm over the whole model is at most ``max_norm``; returns the norm before
    clipping, 0-dim float64 on the CPU, equal on every rank. All ranks must call it, after the window.

    Each element is counted once, whatever the mesh, ties or replicas. Gradients that are not finite stay so.

    Args:
        model: from ``parallelize``.
        max_norm: above 0; ``inf`` only measures.
        norm_type: p of the norm, above 0; ``inf`` or ``"inf"`` for the largest element.
    """
    p = p_of(norm_type)
    if not _is_limit(max_norm):
        raise ConfigError(
            f"clip_grad_norm_(max_norm={max_norm!r})", why="it is a number above 0", fix="use max_norm=1.0"
        )
    runtime = runtime_of(model)
    refuse_in_window(runtime, "clip_grad_norm_", "clip after the with block, once for all micro-batches")
    refuse_unreduced(runtime, "clip_grad_norm_")
    total = GradientNorm(runtime, p)
    settings = f"max_norm={float(max_norm)}, norm_type={p}"  # part of its name: ranks that differ are refused
    summed = runtime.world.agreement.sum({"norm": total.entry()}, f"clipping ({settings})")
    norm = total.finish(summed["norm"])
    scale_gradients(runtime, float(norm), float(max_norm))
    return norm


@public_call()
def clip_grad_value_(model: nn.Module, value: float) -> None:
    """Clamps every gradient element to [-value, value]. No communication.

    Args:
        model: from ``parallelize``.
        value: the largest absolute value of an element.

    Raises:
        UnsupportedError: a trained parameter is complex.
    """
    if not _is_limit(value):
        raise ConfigError(f"clip_grad_value_(value={value!r})", why="it is a number above 0", fix="use value=1.0")
    runtime = runtime_of(model)
    refuse_in_window(runtime, "clip_grad_value_", "clip after the with block, once for all micro-batches")
    refuse_unreduced(runtime, "clip_grad_value_")
    _refuse_complex(runtime, f"clip_grad_value_(value={value})")
    _clamp(runtime, float(value))


def scale_gradients(runtime: Runtime, norm: float, max_norm: float) -> None:
    """Multiplies all local gradients by ``max_norm / (norm + 1e-6)`` if that is below 1 (torch's own formula)."""
    factor = max_norm / (norm + 1e-6)
    grads = [grad for grad in runtime.gradients().values() if grad.numel()]
    if factor < 1.0 and grads:
        foreach_scale(grads, factor)


def _clamp(runtime: Runtime, value: float) -> None:
    for grad in runtime.gradients().values():
        grad.clamp_(-value, value)


def _is_limit(value: Any) -> bool:
    return not isinstance(value, str) and _number(value) > 0


def _number(value: Any) -> float:
    """``value`` as a float, from a Python or numpy number or a one-element tensor; NaN for anything else, bools
    included."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def p_of(norm_type: Any) -> float:
    """The p of a norm as a float; given as torch accepts it: a number, or the string "inf"."""
    p = _number(norm_type)
    if not p > 0:
        raise ConfigError(
            f"norm_type={norm_type!r}",
            why="it is the p of a p-norm, a number above 0",
            fix='use 2.0; "inf" for the largest element, 1.0 for the sum of all',
        )
    return p


def _refuse_complex(runtime: Runtime, given: str) -> None:
    name = next((name for name in runtime.trainable if runtime.parameters[name].is_complex()), None)
    if name is not None:
        raise UnsupportedError(
            given,
            why="a complex gradient is neither above nor below a value, and torch does not clamp one either",
            fix="clip by the norm: max_grad_norm=1.0",
            name=name,
        )
