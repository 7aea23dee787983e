"""Starts, watches and ends the ranks of one machine."""

from shardwise.launch.process import free_port

__all__ = ["free_port"]
