"""Whether ranks that compute the same loss, of the same samples with the same outputs, have the same sums of it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.parallel import Runtime
from shardwise.world.agreement import Entry

_ROUNDING = 1e-4  # relative: sums that are made in another order, by atomic additions of a GPU
_SUMS = "equal "  # and the name of an entry of the loss


def entries_of_losses(runtime: Runtime, sums: Mapping[str, Tensor]) -> dict[str, Entry]:
    """For the exchange: for each entry of the loss that of the first rank, less the mean of those that have the same loss, and the size
    of all; nothing where no technique says that ranks have the same (:attr:`Runtime.other_loss`)."""
    world = runtime.world
    if runtime.other_loss is None:
        return {}
    num_others = world.size // world.axis("loss").size - 1
    weight = 1.0 if world.counts else -1.0 / num_others
    return {_SUMS + name: torch.stack((value * weight, value.abs())) for name, value in sums.items()}


def refuse_other_losses(runtime: Runtime, agreed: Mapping[str, Tensor]) -> None:
    """Raises the technique's error, on every rank, for a loss of which these ranks have other sums: what one of them has a part of was
    taken for all. ``agreed``: the exchanged entries."""
    if runtime.other_loss is None:
        return
    for name in sorted(agreed):
        if name.startswith(_SUMS):
            difference, size = agreed[name].tolist()
            if abs(difference) > _ROUNDING * size:  # not of NaN, which has an error of its own
                raise runtime.other_loss(name.removeprefix(_SUMS))
