"""The fork server: a process that imports what the ranks of one machine need, once, and is forked for each rank.

Run as ``python -m shardwise.launch --serve CONNECTION PARENT``: a file descriptor and a process id. Requests over
CONNECTION, and their answers:

* A :class:`Preload`, first. Answer: ``("ready", output, "")``, or ``("unfit", output, why)`` where this process may not
  be forked.
* An environment and a number of descriptors; the descriptors follow the request. Answer: ``("started", process id)`` or
  ``("failed", why)``.
* The process id of a rank that has ended. Answer: ``("ended", process id, exit code)``; the id is free from then on.
* Without a request, if the preload asks for it: ``("ended", process id, exit code)`` whenever a rank ends.

multiprocessing has a similar server. The children of this one are ranks, each with its own streams, process group and
exit: those of a run (:mod:`shardwise.launch.child`) and the warm ones of a test pool (:mod:`shardwise.testing.worker`).
"""

import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from shardwise.launch.imports import import_frozen
from shardwise.launch.process import die_with_parent, kill_group, num_threads
from shardwise.launch.stop_signals import blocked_at_start

# Sent to whole jobs, and meant for the ranks, which may have something to save. If the server ended, the ranks would
# too.
_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Preload:
    """The first message to the fork server: what to import and what a rank runs.

    Args:
        modules: modules to import.
        path: ``sys.path`` of the parent, where the ranks would find them.
        runs: what a rank runs, as ``pkg.mod:fn``; it receives a list of words: the numbers of its descriptors, and the
            server's process id.
        tells_ends: whether the server reports the end of a rank when it happens (Linux only), or only when asked.
    """

    modules: tuple[str, ...]
    path: tuple[str, ...]
    runs: str = "shardwise.launch.child:main"
    tells_ends: bool = True


def main(argv: list[str]) -> int:
    """Runs the server. Returns only in forked ranks, with their exit status; the server itself calls ``os._exit``."""
    connection, parent = Connection(int(argv[0])), int(argv[1])
    die_with_parent(parent)
    os.set_inheritable(connection.fileno(), False)
    # Blocked, not ignored: a signal that arrives before a rank is ready for it is kept.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
    given, rank_argv = dict(os.environ), None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        preload = connection.recv()
        _prepare(connection, preload)
        rank_argv = _serve(connection, given, tells_ends=preload.tells_ends)
    if rank_argv is None:
        os._exit(0)  # nothing here needs the cleanup that torch does at a normal exit, which takes time
    sys.argv[1:] = rank_argv
    module, _, name = preload.runs.partition(":")
    return getattr(sys.modules[module], name)(rank_argv)


def _prepare(connection: Connection, preload: Preload) -> None:
    """Imports the modules and answers whether a fork would work (one thread only), with what the imports printed."""
    captured = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed below
    for place, file in enumerate(captured, start=1):
        os.dup2(file.fileno(), place)
    sys.path[:] = preload.path
    why = ""
    try:
        for name in (*preload.modules, preload.runs.partition(":")[0]):
            import_frozen(name)
        if preload.tells_ends:
            os.close(os.pidfd_open(os.getpid()))  # Linux before 5.3 has none
        if (count := num_threads()) > 1:
            why = f"{count} threads run after the imports, and a fork would have one of them"
    except Exception:  # a rank that does these imports itself reports what is wrong
        why = traceback.format_exc()
    _flush()
    output = []
    for file in captured:
        with file:
            file.seek(0)
            output.append(file.read().decode("utf-8", "replace"))
    connection.send(("unfit" if why else "ready", output, why))


def _flush() -> None:
    """Flushes all output buffers: every forked rank would write what is left in one."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _serve(connection: Connection, given: Mapping[str, str], *, tells_ends: bool) -> list[str]:
    """Forks a rank for each request, until the connection ends. Returns only in a rank, with its arguments."""
    alive: dict[int, int] = {}  # pidfd of each running rank, which can be waited for -> its process id
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
    """Forks one rank. In the rank returns its arguments; in the server None, after adding the rank to ``alive``."""
    descriptors = _receive_descriptors(connection, count)
    server, pid = os.getpid(), None
    try:
        if len(descriptors) < count:  # the system drops descriptors for which this process has no room
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
    """Sends copies of file descriptors in one message. The receiver drops those it has no room for; the stream stays
    valid."""
    with _socket_of(connection) as sender:
        socket.send_fds(sender, [b"+"], descriptors)


def _receive_descriptors(connection: Connection, count: int) -> list[int]:
    with _socket_of(connection) as receiver:
        return socket.recv_fds(receiver, 1, count)[1]


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The connection as a socket, not a copy of it, for which there may be no free descriptor."""
    found = socket.socket(fileno=connection.fileno())
    try:
        yield found
    finally:
        found.detach()


def _watched(pid: int) -> int:
    """A pidfd for the new rank, which becomes readable when the rank has ended.

    Raises:
        OSError: no free descriptor; the rank has been killed.
    """
    # The rank does this too: whichever is first, from here on the rank has a process group, which its children inherit.
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
        # Python reseeds its own generator after a fork; this does it for numpy, so that ranks do not draw equal
        # numbers.
        sys.modules["numpy.random"].seed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(_FOR_RANKS) - blocked_at_start())


def _exit_code(pid: int) -> int:
    """The exit code of an ended rank, below 0 for a signal. It stays a zombie, so that its id is not reused while it
    may still be signalled."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
