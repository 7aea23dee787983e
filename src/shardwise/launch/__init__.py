"""Starts the ranks of one machine, watches them, and ends them."""

from shardwise.launch.devices import default_nproc, is_cpu
from shardwise.launch.events import report_failure, send_event
from shardwise.launch.local import launch_local
from shardwise.launch.process import free_port, held_port
from shardwise.launch.stop_signals import STOP_SIGNALS, passed_over, terminable

__all__ = [
    "STOP_SIGNALS", "default_nproc", "free_port", "held_port", "is_cpu", "launch_local", "passed_over",
    "report_failure", "send_event", "terminable",
]  # fmt: skip
