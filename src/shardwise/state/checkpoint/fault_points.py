"""Named moments of a checkpoint save, at which tests inject a kill or a fault."""

from collections.abc import Callable

POINTS = (
    "begun", "staged", "reserved", "met", "half-written", "written", "synced", "summed", "manifest-half-written",
    "manifest-written", "manifest-synced", "renamed", "durable", "latest", "acknowledged", "pruning", "pruned",
)  # fmt: skip
"""In the order in which a save reaches them. From "renamed" on the new checkpoint exists; before, it does not."""

_act: Callable[[str], None] | None = None


def at_fault_point(point: str) -> None:
    """Marks that a save has reached ``point``."""
    if _act is not None:
        _act(point)


def on_reach(act: Callable[[str], None] | None) -> None:
    """Sets a function to be called with the name of every point that this process reaches; None: none."""
    global _act
    _act = act
