"""Checkpoints: the full state of a run, complete or absent, verified by checksums when read, loadable under any
layout."""

from shardwise.state.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
