"""The process that imports what the ranks of one machine need, once, and is forked for each of them.

Run as ``python -m shardwise.launch --serve CONNECTION PARENT``: a file descriptor and a process id. What goes over CONNECTION:

=====================================  =========================================================================================
a :class:`Preload`, first              ``("ready", output, "")`` or ``("unfit", output, why)``: whether this process may be forked
an environment, number of descriptors  ``("started", process id)`` or ``("failed", why)``; the descriptors follow what is sent
a process id, of a rank that has ended  ``("ended", process id, exit code)``: the id is free from then on
(nothing)                              ``("ended", process id, exit code)``, whenever a rank has, if the preload asks for it
=====================================  =========================================================================================

multiprocessing has a server like it; this one's children are ranks with streams, a group and an end of their own: those of a run, as
:mod:`shardwise.launch.child` serves them, and the warm ones of a test pool, :mod:`shardwise.testing.worker`.
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
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from shardwise.launch.process import die_with_parent, kill_group
from shardwise.launch.stop_signals import blocked_at_start

__all__ = ["Preload", "main", "send_descriptors"]

# Sent to whole jobs, and meant for the ranks, which may have something to save: without this process they would end.
_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Preload:
    """What comes first.

    Args:
        modules: to be imported.
        path: ``sys.path`` of the parent, where the ranks would find them.
        runs: what a rank runs, as ``pkg.mod:fn``; it is given a list of words: numbers of its descriptors, and this process's id.
        tells_ends: the end of a rank is reported when it comes (on Linux alone), not when it is asked for.
    """

    modules: tuple[str, ...]
    path: tuple[str, ...]
    runs: str = "shardwise.launch.child:main"
    tells_ends: bool = True


def main(argv: list[str]) -> int:
    """Returns in the ranks, with their exit status: they end as any interpreter does. The server ends by itself."""
    connection, parent = Connection(int(argv[0])), int(argv[1])
    die_with_parent(parent)
    os.set_inheritable(connection.fileno(), False)
    # Blocked, not ignored: what comes for a rank before it is ready for it is kept.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
    given, rank_argv = dict(os.environ), None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        preload = connection.recv()
        _prepare(connection, preload)
        rank_argv = _serve(connection, given, tells_ends=preload.tells_ends)
    if rank_argv is None:
        os._exit(0)  # nothing here is worth the time that torch takes to leave
    sys.argv[1:] = rank_argv
    module, _, name = preload.runs.partition(":")
    return getattr(sys.modules[module], name)(rank_argv)


def _prepare(connection: Connection, preload: Preload) -> None:
    """Imports the modules, and says whether a fork would have all that they have started, and what they have printed."""
    captured = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed below
    for place, file in enumerate(captured, start=1):
        os.dup2(file.fileno(), place)
    sys.path[:] = preload.path
    why = ""
    try:
        for name in (*preload.modules, preload.runs.partition(":")[0]):
            importlib.import_module(name)
        if preload.tells_ends:
            os.close(os.pidfd_open(os.getpid()))  # Linux before 5.3 has none
        if (count := _num_threads()) > 1:
            why = f"{count} threads run after the imports, and a fork would have one of them"
    except Exception:  # a rank that imports them for itself says what is wrong
        why = traceback.format_exc()
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that the ranks share
    _flush()
    output = []
    for file in captured:
        with file:
            file.seek(0)
            output.append(file.read().decode("utf-8", "replace"))
    connection.send(("unfit" if why else "ready", output, why))


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # not Linux
        return threading.active_count()


def _flush() -> None:
    """What is left in a buffer would be written by every rank."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _serve(connection: Connection, given: Mapping[str, str], *, tells_ends: bool) -> list[str]:
    """Forks a rank whenever one is asked for, until the connection ends. Returns in each rank, with its words."""
    alive: dict[int, int] = {}  # of each rank that runs, a descriptor that can be waited for -> its process id
    while True:
        for ready in wait([connection, *alive]):
            if isinstance(ready, int):
                pid = alive.pop(ready)
                os.close(ready)
                connection.send(("ended", pid, _exit_code(pid)))
                continue
            asked = connection.recv()
            if isinstance(asked, int):
                connection.send(("ended", asked, os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])))
                continue
            env, count = asked
            rank_argv = _fork(connection, env, count, given, alive if tells_ends else None)
            if rank_argv is not None:
                return rank_argv


def _fork(
    connection: Connection, env: Mapping[str, str], count: int, given: Mapping[str, str], alive: dict[int, int] | None
) -> list[str] | None:
    """The next rank: its words; None in the server, where the rank is in ``alive`` from then on, if its end is to be told."""
    descriptors = _receive_descriptors(connection, count)
    server, pid = os.getpid(), None
    try:
        if len(descriptors) < count:  # the system leaves out those for which there is no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pid = os.fork()
        if pid and alive is not None:
            alive[_watched(pid)] = pid
        answer = "started", pid
    except OSError as error:
        answer = "failed", str(error.strerror)
    if pid == 0:
        *own, stdout, stderr = descriptors
        env = {name: value for name, value in env.items() if given.get(name) != value}
        _become_a_rank(connection, [stdout, stderr], env)
        return [*map(str, own), str(server)]
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(_FOR_RANKS) - blocked_at_start())


def _exit_code(pid: int) -> int:
    """Below 0: a signal. The process stays a zombie, so that its id is nobody else's for as long as it may be signalled."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
