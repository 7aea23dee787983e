"""The moments of a save, by name: where a kill or a fault is tried."""

from collections.abc import Callable

__all__ = ["POINTS", "at_fault_point", "on_reach"]

POINTS = (
    "begun", "staged", "reserved", "met", "half-written", "written", "synced", "summed", "manifest-half-written",
    "manifest-written", "manifest-synced", "renamed", "durable", "latest", "acknowledged", "pruning", "pruned",
)  # fmt: skip
"""In the order in which a save reaches them. From "renamed" on the new checkpoint counts; before, it does not exist."""

_act: Callable[[str], None] | None = None


def at_fault_point(point: str) -> None:
    """A save is at ``point``."""
    if _act is not None:
        _act(point)


def on_reach(act: Callable[[str], None] | None) -> None:
    """Has ``act`` called with the name of every point that this process reaches; None: no longer."""
    global _act
    _act = act
