"""The norm of each parameter, of its gradient, or of what is kept for it: of the whole, under every layout."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise.config.keywords import public_call
from shardwise.errors import ConfigError, UsageError
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.step_checks import refuse_in_window, refuse_unreduced
from shardwise.step.clip import NormType, p_of
from shardwise.step.norm import norm_power_sum


@public_call()
def parameter_norms(
    model: nn.Module,
    of: Literal["parameters", "gradients"] | Mapping[str, Tensor] = "parameters",
    *,
    norm_type: NormType = 2.0,
) -> dict[str, Tensor]:
    """The norm of each parameter, or of its gradient, equal on every rank: name -> 0-dim float64 on the CPU. All ranks must call
    it; they exchange once, one number for each name.

    Args:
        model: from ``parallelize``.
        of: ``"parameters"``, ``"gradients"`` (after the window; those that are None are left out), or name of a parameter -> tensor that is
            cut as it is: an update, an average, a product of the two.
        norm_type: p of the norm, above 0; ``inf`` or ``"inf"`` for the largest element.

    Example:
        >>> trust = {name: norm / grads[name] for name, norm in sw.parameter_norms(model).items()}  # doctest: +SKIP
    """
    p, runtime = p_of(norm_type), runtime_of(model)
    given = _given(runtime, of)
    own = [norm_power_sum(runtime.owned(name, local), p).cpu() for name, local in given.items()]
    settings = f"of={of if isinstance(of, str) else 'tensors'}, norm_type={p}"
    entries: dict[str, Any] = {
        name: runtime.world.agreement.slots(value) if math.isinf(p) else value
        for name, value in zip(given, own, strict=True)
    }
    summed = runtime.world.agreement.sum(entries, f"parameter_norms ({settings})")
    return {name: summed[name].max() if math.isinf(p) else summed[name] ** (1.0 / p) for name in given}


def _given(runtime: Runtime, of: Any) -> dict[str, Tensor]:
    if of == "parameters":
        runtime.check_values()
        return {name: local_tensor(param).detach() for name, param in runtime.parameters.items()}
    if of == "gradients":
        refuse_in_window(runtime, "parameter_norms(of='gradients')", "call it after the with block")
        refuse_unreduced(runtime, "parameter_norms(of='gradients')")
        return runtime.gradients()
    if not isinstance(of, Mapping):
        raise ConfigError(
            f"parameter_norms(of={of!r})",
            why="nothing is known by that name",
            fix='use "parameters", "gradients", or a mapping: name of a parameter -> tensor',
        )
    found = {}
    for name, tensor in of.items():
        if name not in runtime.parameters:
            raise UsageError(
                "parameter_norms of a tensor by a name that no parameter has",
                why="which part of it a rank has is known by the parameter that it is cut like",
                fix="use the names of model.named_parameters()",
                name=name,
            )
        local = local_tensor(tensor).detach()
        if local.shape != local_tensor(runtime.parameters[name]).shape:
            raise UsageError(
                f"parameter_norms of a tensor of shape {tuple(local.shape)} on this rank",
                why=f"this rank's part of the parameter has {tuple(local_tensor(runtime.parameters[name]).shape)}, so it is not cut alike",
                fix="give what was computed from the parameter, or its gradient, element by element",
                name=name,
            )
        found[name] = local
    return found
