"""Reads the code of forwards, without running it: which modules every rank is sure to enter."""

from shardwise.anatomy.code.entries import Entries, read_entries
from shardwise.anatomy.code.objects import unwrap_module

__all__ = ["Entries", "read_entries", "unwrap_module"]
