"""What a training step is refused for once its window has run: old gradients, a window without tokens, numbers that are not finite."""

from torch import Tensor

from shardwise.errors import ConfigError, NonFiniteError, UsageError
from shardwise.parallel import Runtime


def refuse_old_gradients(runtime: Runtime) -> None:
    """Raises UsageError for gradients from outside the window: they would change what is clipped and checked."""
    for name, grad in runtime.gradients().items():
        if bool(grad.any()):
            raise UsageError(
                "gradients that were there before the step",
                why="a TrainStep clips, checks and steps the gradients of its own window only",
                fix="call optim.zero_grad() first; to add up several windows, use sw.window and step yourself",
                name=name,
            )


def nothing_counted(loss: float) -> ConfigError:
    """The error for a loss that is not 0 in a window without a valid token."""
    return ConfigError(
        f"a window of 0 tokens whose loss is {loss:g}",
        why="a sum is divided by what count(batch) returns for the micro-batches of all ranks; of a window without a valid token it is 0",
        fix="let count= return what the loss runs over: the labels that are not -100, or the samples",
    )


def nonfinite(
    runtime: Runtime, step: int, loss: float, norm: float, own_loss: Tensor, p: float, scale: float | None
) -> NonFiniteError:
    """The error for a step whose loss or gradients are not finite, with the ranks and the first parameter; all ranks must call it.

    Args:
        runtime: of the model.
        step: its number.
        loss, norm: over all ranks.
        own_loss: the loss of this rank.
        p: of the norm.
        scale: that the loss was multiplied by; None: nothing is scaled.
    """
    bad = next((name for name, grad in runtime.gradients().items() if not grad.isfinite().all()), None)
    per_rank = runtime.world.agreement.gather((bool(own_loss.isfinite()), bad), "naming what is not finite")
    by_loss = tuple(rank for rank, (is_finite, _) in enumerate(per_rank) if not is_finite)
    by_gradient = tuple(rank for rank, (_, name) in enumerate(per_rank) if name is not None)
    names = {name for _, name in per_rank}
    if by_loss:
        where = f"the loss of rank {_listed(by_loss)} is not finite"
    elif by_gradient:
        where = f"every rank's loss is finite, the gradient in the shards of rank {_listed(by_gradient)} is not"
    else:  # the gradients are finite, their powers are not
        where = f"loss and gradients are finite, the sum of their powers for norm_type={p:g} is not"
    half = "" if scale is None else f", loss scale {scale:g}"
    return NonFiniteError(
        f"step {step}: loss {loss:g}, gradient norm {norm:g}{half}",
        why=f"{where}; parameters were left as they were",
        fix='lower the learning rate, look at the batch, or go on without such steps: on_nonfinite="skip"'
        + ("; float16 ends at 65504 whatever the scale: let the loss take output.float(), or use bf16" if half else ""),
        name=next((name for name in runtime.recipe.params if name in names), None),
        ranks=by_loss or by_gradient,
    )


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
