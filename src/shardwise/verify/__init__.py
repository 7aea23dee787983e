"""Proof that ranks compute what one process computes: the oracle, the sharded run, the comparison."""

from shardwise.verify.compare import Report, compare
from shardwise.verify.oracle import StepRecord, Task, run_oracle
from shardwise.verify.run import GATES, verify
from shardwise.verify.sharded import run_sharded

__all__ = ["GATES", "Report", "StepRecord", "Task", "compare", "run_oracle", "run_sharded", "verify"]
