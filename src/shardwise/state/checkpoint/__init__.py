"""Checkpoints: everything of a run, complete or absent, verified when read, under any layout."""

from shardwise.state.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
