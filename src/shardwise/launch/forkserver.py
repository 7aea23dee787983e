"""The process that imports what the ranks of one machine need, once, and is forked for each of them.

Run as ``python -m shardwise.launch.forkserver CONNECTION PARENT``: a file descriptor and a process id. Over CONNECTION come
a :class:`Preload`, to which the answer is whether this process may be forked, and one environment for each rank, with its
file descriptors, to which the answer is a process id. Then it says how each of them ends, until nobody listens.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection

from shardwise.launch import child
from shardwise.launch.process import die_with_parent

__all__ = ["Preload", "main"]

# Sent to whole jobs, and meant for the ranks, which may have something to save: without this process they would end.
_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Preload:
    """What comes first.

    Args:
        modules: to be imported.
        path: ``sys.path`` of the parent, where the ranks would find them.
        num_ranks: how many there will be.
    """

    modules: tuple[str, ...]
    path: tuple[str, ...]
    num_ranks: int


def main(argv: list[str]) -> int:
    """Returns in the ranks, with their exit status: they end as any interpreter does. The server ends by itself."""
    connection, parent = Connection(int(argv[0])), int(argv[1])
    die_with_parent(parent)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _FOR_RANKS}
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        preload = connection.recv()
        said = [_caught(place) for place in (1, 2)]
        ready = _import(preload)
        connection.send(ready)
        for _ in range(preload.num_ranks if ready else 0):
            words = _fork(connection, said)
            if words is not None:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                return child.main(words)
            said = []
        _tell_ends(connection)
    os._exit(0)  # nothing here is worth the time that torch takes to leave


def _caught(place: int) -> int:
    """Lets what is written to a file descriptor pile up: what imports print is for rank 0 to say."""
    said = os.memfd_create("said")
    os.dup2(said, place)
    return said


def _import(preload: Preload) -> bool:
    """Whether the modules are there, and a fork would have all that they have started."""
    sys.path[:] = preload.path
    try:
        for name in preload.modules:
            importlib.import_module(name)
        num_threads = len(os.listdir("/proc/self/task"))
    except Exception:  # a rank that imports them for itself says what is wrong
        return False
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that the ranks share
    return num_threads == 1


def _fork(connection: Connection, said: list[int]) -> list[str] | None:
    """The next rank: its words for :func:`shardwise.launch.child.main`; None in the server."""
    env = connection.recv()
    control, events, *outputs = [reduction.recv_handle(connection) for _ in range(4)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    server, pid = os.getpid(), os.fork()
    if pid:
        # Said by the rank too: whoever comes first, from here on it has a group, which its children will be in.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        for descriptor in (control, events, *outputs, *said):
            os.close(descriptor)
        connection.send(pid)
        return None
    os.setpgid(0, 0)
    connection.close()
    for place, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    for place, descriptor in enumerate(said, start=1):
        with open(descriptor, "rb") as file:
            file.seek(0)
            os.write(place, file.read())
    os.environ.clear()
    os.environ.update(env)
    if "numpy" in sys.modules:
        sys.modules[
            "numpy"
        ].random.seed()  # as Python does for its own generator: ranks do not draw the same by accident
    return [str(control), str(events), str(server)]


def _tell_ends(connection: Connection) -> None:
    with contextlib.suppress(ChildProcessError):  # there are no more
        while True:
            pid, status = os.wait()
            connection.send((pid, os.waitstatus_to_exitcode(status)))
    connection.recv()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
