"""What a ``GradScaler`` records about an optimizer."""

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState


def scale_of(scaler: torch.amp.GradScaler) -> Tensor:
    """The scale as a float64 0-dim tensor, where the scaler has it. A loss must have been scaled before."""
    return scaler._check_scale_growth_tracker("scale_of")[0].double()


def tell_scaler(scaler: torch.amp.GradScaler, optim: torch.optim.Optimizer, *, found_inf: bool) -> None:
    """Leaves ``scaler`` as its ``unscale_(optim)`` would, for gradients that were divided and checked by other code."""
    scale, _ = scaler._check_scale_growth_tracker("unscale_")
    state = scaler._per_optimizer_states[id(optim)]
    state["found_inf_per_device"] = {scale.device: torch.full_like(scale, float(found_inf))}
    state["stage"] = OptState.UNSCALED


def is_unscaled(scaler: torch.amp.GradScaler, optim: torch.optim.Optimizer) -> bool:
    """Whether the gradients of ``optim`` were divided by the scale since the last ``scaler.update()``."""
    return scaler._per_optimizer_states[id(optim)]["stage"] is not OptState.READY
