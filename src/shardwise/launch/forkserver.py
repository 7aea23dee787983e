"""The process that imports what the ranks of one machine need, once, and is forked for each of them.

Run as ``python -m shardwise.launch --serve CONNECTION PARENT``: a file descriptor and a process id. What goes over CONNECTION:

======================================  ================================================================================
a :class:`Preload`, first               ``("ready", output)`` or ``("unfit", output)``: whether this process may be forked
an environment, and 4 file descriptors  ``("started", process id)`` or ``("failed", why)``
(nothing)                               ``("ended", process id, exit code)``, whenever a rank has
======================================  ================================================================================

multiprocessing has a server like it; this one's children are ranks as :mod:`shardwise.launch.child` serves them, with streams,
a group and an end of their own. That of the test pool, :mod:`shardwise.testing.zygote`, makes ranks that are used again.
"""

import contextlib
import ctypes
import errno
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from shardwise.launch import child
from shardwise.launch.notice import kept_back
from shardwise.launch.process import die_with_parent, kill_group

__all__ = ["Preload", "main", "send_descriptors"]

# Sent to whole jobs, and meant for the ranks, which may have something to save: without this process they would end.
_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Preload:
    """What comes first.

    Args:
        modules: to be imported.
        path: ``sys.path`` of the parent, where the ranks would find them.
    """

    modules: tuple[str, ...]
    path: tuple[str, ...]


def main(argv: list[str]) -> int:
    """Returns in the ranks, with their exit status: they end as any interpreter does. The server ends by itself."""
    connection, parent = Connection(int(argv[0])), int(argv[1])
    die_with_parent(parent)
    os.set_inheritable(connection.fileno(), False)
    # Blocked, not ignored: what comes for a rank before it is ready for it is kept.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
    given, rank_argv = dict(os.environ), None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _prepare(connection)
        rank_argv = _serve(connection, given)
    if rank_argv is None:
        os._exit(0)  # nothing here is worth the time that torch takes to leave
    sys.argv[1:] = rank_argv
    return child.main(rank_argv)


def _prepare(connection: Connection) -> None:
    """Imports the modules, and says whether a fork would have all that they have started, and what they have printed."""
    preload = connection.recv()
    captured = [os.memfd_create("output") for _ in range(2)]
    for place, descriptor in enumerate(captured, start=1):
        os.dup2(descriptor, place)
    sys.path[:] = preload.path
    try:
        for name in preload.modules:
            importlib.import_module(name)
        os.close(os.pidfd_open(os.getpid()))  # Linux before 5.3 has none
        fit = len(os.listdir("/proc/self/task")) == 1
    except Exception:  # a rank that imports them for itself says what is wrong
        fit = False
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that the ranks share
    _flush()
    output = []
    for descriptor in captured:
        with open(descriptor, "rb") as file:
            file.seek(0)
            output.append(file.read().decode("utf-8", "replace"))
    connection.send(("ready" if fit else "unfit", output))


def _flush() -> None:
    """What is left in a buffer would be written by every rank."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _serve(connection: Connection, given: Mapping[str, str]) -> list[str]:
    """Forks a rank whenever one is asked for, until the connection ends. Returns in each rank, with its words for
    :func:`shardwise.launch.child.main`."""
    alive: dict[int, int] = {}  # of each rank that runs, a descriptor that can be waited for -> its process id
    while True:
        for ready in wait([connection, *alive]):
            if isinstance(ready, int):
                pid = alive.pop(ready)
                os.close(ready)
                connection.send(("ended", pid, _exit_code(pid)))
                continue
            rank_argv = _fork(connection, given, alive)
            if rank_argv is not None:
                return rank_argv


def _fork(connection: Connection, given: Mapping[str, str], alive: dict[int, int]) -> list[str] | None:
    """The next rank: its words; None in the server, where the rank is in ``alive`` from then on."""
    env = connection.recv()
    descriptors = _receive_descriptors(connection, 4)
    server, pid = os.getpid(), None
    try:
        if len(descriptors) < 4:  # the system leaves out those for which there is no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pid = os.fork()
        if pid:
            alive[_watched(pid)] = pid
        answer = "started", pid
    except OSError as error:
        answer = "failed", str(error.strerror)
    if pid == 0:
        control, events, *outputs = descriptors
        _become_a_rank(connection, outputs, {name: value for name, value in env.items() if given.get(name) != value})
        return [str(control), str(events), str(server)]
    for descriptor in descriptors:
        os.close(descriptor)
    connection.send(answer)
    return None


def send_descriptors(connection: Connection, descriptors: Sequence[int]) -> None:
    """Sends copies of file descriptors, all at once: what has no room is left out there, and what follows is understood."""
    with _socket_of(connection) as sender:
        socket.send_fds(sender, [b"+"], descriptors)


def _receive_descriptors(connection: Connection, count: int) -> list[int]:
    with _socket_of(connection) as receiver:
        return socket.recv_fds(receiver, 1, count)[1]


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The connection itself, not a copy, for which there may be no room."""
    found = socket.socket(fileno=connection.fileno())
    try:
        yield found
    finally:
        found.detach()


def _watched(pid: int) -> int:
    """A descriptor that tells when the new rank has ended.

    Raises:
        OSError: there are too many; the rank has been ended.
    """
    # Said by the rank too: whoever comes first, from here on it has a group, which its children will be in.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    try:
        return os.pidfd_open(pid)
    except OSError:
        kill_group(pid)
        os.waitpid(pid, 0)
        raise


def _become_a_rank(connection: Connection, outputs: list[int], env: Mapping[str, str]) -> None:
    os.setpgid(0, 0)
    connection.close()
    for place, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.update(env)
    if "numpy.random" in sys.modules:
        # As Python does for its own generator: no two ranks draw the same by accident.
        sys.modules["numpy.random"].seed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(_FOR_RANKS) - kept_back())


def _exit_code(pid: int) -> int:
    """Below 0: a signal. The process stays a zombie, so that its id is nobody else's for as long as it may be signalled."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
