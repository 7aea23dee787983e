"""Checks that all ranks step with the same optimizer settings: otherwise replicas would silently drift apart, and
shards be updated with different learning rates."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.parallel import runtime_of
from shardwise.world import agree_on, described
from shardwise.world.agreement import digest_of_text

if TYPE_CHECKING:
    from shardwise.step.step import TrainStep

_NUMBERS = (bool, int, float, complex, str, tuple, list, type(None))


def digest_of_settings(optim: torch.optim.Optimizer) -> int:
    """A digest of the settings of every parameter group that can be read without waiting for a device: the loop, a
    scheduler outside the step or a resumed state may have changed them on one rank."""
    return digest_of_text(
        repr([[(key, _read(value)) for key, value in group.items() if key != "params"] for group in optim.param_groups])
    )


def _read(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value if isinstance(value, _NUMBERS) else None


def agree_on_settings(step: "TrainStep") -> None:
    """Raises RankError on every rank if ranks would step with different settings: replicas would silently drift
    apart."""
    facts: dict[str, Any] = {
        "optimizer": type(step.optim).__qualname__,
        "scheduler": type(step.scheduler).__qualname__,
        **step.clipping.facts,
        "on_nonfinite": step.on_nonfinite,
        "scaler": described(step.scaler and step.scaler.state_dict()),
    }
    for i, group in enumerate(step.optim.param_groups):
        facts[f"group {i}: parameters"] = len(group["params"])
        facts |= {f"group {i}: {key}": described(value) for key, value in sorted(group.items()) if key != "params"}
    agree_on(
        runtime_of(step.model).world.agreement,
        facts,
        what="the ranks' steps",
        fix="build the same optimizer, scheduler and TrainStep with the same settings on every rank",
    )
