"""Compares sharded training with one plain process: the reference run (the oracle), the sharded run, the comparison."""

import sys
from types import ModuleType

from shardwise.verify.compare import Report, compare
from shardwise.verify.oracle import StepRecord, Task, run_oracle
from shardwise.verify.run import GATES, verify
from shardwise.verify.sharded import run_sharded

__all__ = ["GATES", "Report", "StepRecord", "Task", "compare", "run_oracle", "run_sharded", "verify"]


class _CallablePackage(ModuleType):
    """The class of this package, which makes it callable: ``sw.verify`` is the function, but an import of the package
    (as by our pytest plugin) makes Python put the package under that name."""

    __call__ = staticmethod(verify)


sys.modules[__name__].__class__ = _CallablePackage
