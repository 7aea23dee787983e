"""How a DataLoader's worker processes begin and end."""

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data._utils import signal_handling

_EXIT_S = 1.0  # in which a process that was killed has an exit status


@contextlib.contextmanager
def no_signal_of_workers() -> Iterator[None]:
    """Context manager in which ``iter(DataLoader(...))`` installs no handler of SIGCHLD. That raises an error of a worker's end
    wherever this process is, in a save or an exchange; whoever waits for the worker's data looks after it every 5 s anyway."""
    was_set = getattr(signal_handling, "_SIGCHLD_handler_set", None)
    if was_set is None:
        yield
        return
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = was_set


def why_ended(batches: Iterator[Any], error: Exception) -> str | None:
    """How a worker of ``iter(DataLoader(...))`` has ended, for an ``error`` that may come of that; None: none has, and the
    error is the dataset's."""
    said = str(error).partition("\n")[0]
    if said.startswith("Caught "):
        return None
    sentinels = {worker.sentinel: worker for worker in getattr(batches, "_workers", ())}
    ended = [sentinels[ready] for ready in wait(list(sentinels), _EXIT_S)]
    for worker in ended:
        worker.join(_EXIT_S)  # a process that ends closes its files before it has an exit status
    codes = [worker.exitcode for worker in ended]
    if said.startswith("DataLoader worker (pid"):
        return f"{said} (exit status {', '.join(map(str, codes)) or 'not known'})"
    return None if not codes else f"it ended with exit status {codes[0]} ({type(error).__name__}: {said})"


def end_workers(batches: Iterator[Any]) -> None:
    """Ends the workers of ``iter(DataLoader(...))`` now. Left to the garbage collector, as after an error whose traceback
    holds the iterator, torch waits five seconds for each and then ends it by a signal."""
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        end()
