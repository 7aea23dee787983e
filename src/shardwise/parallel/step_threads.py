"""Gives an optimizer that steps on parameters in host memory the rank's share of the node's cores.

A launcher gives each rank one thread (OMP_NUM_THREADS=1): enough where a device computes, and not for the step of
offloaded parameters, which runs on the CPU alone.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shardwise.parallel.runtime import Runtime


@contextlib.contextmanager
def threads_of_step(stepped: Iterable[Runtime]) -> Iterator[None]:
    """Context manager: a step of the ``stepped`` models uses its number of threads."""
    threads = HookedThreads()
    threads.begin(stepped)
    try:
        yield
    finally:
        threads.end()


class HookedThreads:
    """:func:`threads_of_step` as a hook before a step and one after it. A step that raises does not run the second one:
    the next step's does."""

    def __init__(self) -> None:
        self._is_raised = False

    def begin(self, stepped: Iterable[Runtime]) -> None:
        """Raises the number of threads, if it is still the launcher's 1 and a model is offloaded."""
        wanted = max((runtime.world.step_threads or 1 for runtime in stepped if runtime.offloads), default=1)
        if wanted > 1 and torch.get_num_threads() == 1:
            torch.set_num_threads(wanted)
            self._is_raised = True

    def end(self, *_: Any) -> None:
        if self._is_raised:
            torch.set_num_threads(1)
            self._is_raised = False
