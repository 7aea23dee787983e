"""Errors for a training step whose loss has no gradient, and for one inside ``torch.autocast``."""

from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, UsageError
from shardwise.model.pytrees import leaves_of
from shardwise.parallel import Runtime


def refuse_autocast(runtime: Runtime, what: str) -> None:
    """Raises UsageError inside ``torch.autocast``: it casts per operator, which differs from the dtypes of the
    recipe."""
    device = runtime.world.device.type
    if torch.is_autocast_enabled(device):
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        word = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
        raise UsageError(
            f"{what} inside torch.autocast({device!r}, dtype=torch.{dtype})",
            why="autocast casts operator by operator, and the dtypes that the model was sharded with say otherwise",
            fix=f'call it outside, and give the dtype to parallelize(..., precision="{word}"); in a loop of your own, sw.window takes '
            "autocast around the forward",
        )


def refuse_gradless(runtime: Runtime) -> None:
    """Raises UsageError, before the first forward, where no loss can have a gradient, or inside autocast."""
    refuse_autocast(runtime, "a training step")
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled() or not _is_trained(runtime):
        raise no_gradient(runtime)


def no_gradient(runtime: Runtime) -> UsageError:
    """The error for a loss that has no gradient on this rank, with the cause."""
    if torch.is_inference_mode_enabled():
        return UsageError(
            "a training step inside torch.inference_mode()",
            why="nothing is recorded there, so backward has nothing to run",
            fix="call step(window) outside it; for a loss without training, sw.evaluate(model, loader)",
        )
    if not torch.is_grad_enabled():
        return UsageError(
            "a training step with gradients switched off",
            why="it runs inside torch.no_grad(), or after torch.set_grad_enabled(False), so nothing is recorded",
            fix="call step(window) outside it; for a loss without training, sw.evaluate(model, loader)",
        )
    if not _is_trained(runtime):
        return UsageError(
            "a model without a trainable parameter",
            why=f"requires_grad is False on all {len(runtime.parameters)} of its parameters",
            fix="leave requires_grad on for what is to be trained, before parallelize",
        )
    return UsageError(
        "a loss that is detached from the model",
        why="it has no gradient: a .detach(), torch.no_grad() or torch.tensor(...) lies between the model and it",
        fix="compute it from the model's output alone; for a micro-batch with nothing to count, return output.sum() * 0",
    )


def refuse_unused(runtime: Runtime, used: Tensor | None) -> None:
    """Raises UsageError, on every rank, after a window in which no rank used a trainable parameter.

    Args:
        runtime: of the model.
        used: how many ranks used each trainable parameter, where the engine knows it; None: gradients show it.
    """
    is_used = (
        any(runtime.parameters[n].grad is not None for n in runtime.trainable) if used is None else bool(used.any())
    )
    if not is_used:
        raise UsageError(
            "a window in which no trainable parameter was used, by any rank",
            why="the loss has a gradient, but it leads to none of the parameters: it is computed from something else than the "
            "model's output, or from an output that was detached on the way",
            fix="compute the loss from what the model returns",
        )


def nothing_of(output: Any, error: ShardwiseError) -> Tensor:
    """0, computed from a model's output: its backward runs the collectives that other ranks wait for, and adds nothing."""
    found = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise error
    return sum((x.sum() * 0 for x in found), torch.zeros((), device=found[0].device))


def explain_no_gradient(runtime: Runtime, error: BaseException) -> UsageError | None:
    """Translates torch's error for a backward without a graph; None for any other error."""
    return no_gradient(runtime) if "does not require grad and does not have a grad_fn" in str(error) else None


def _is_trained(runtime: Runtime) -> bool:
    return any(param.requires_grad for param in runtime.parameters.values())
