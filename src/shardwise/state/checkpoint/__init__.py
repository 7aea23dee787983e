"""Checkpoints: everything of a run, complete or absent, verified when read, under any layout."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.state.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]


def __getattr__(name: str) -> Any:
    # On demand: whatever reads weights knows manifests, and the manager is built on what reads weights.
    if name == "CheckpointManager":
        from shardwise.state.checkpoint.manager import CheckpointManager

        return CheckpointManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
