"""The process that imports torch once and forks a warm rank whenever the pool needs one.

A rank then costs some ten milliseconds instead of a whole import of torch, which is what makes it cheap to throw away
a rank that died or hangs. It stays single-threaded and never computes, so forking it is safe. When the pool's process
ends, in whatever way, the connection ends with it, and the ranks are killed with their children.

Run as ``python -m shardwise.testing.zygote FD MODULE ...``; FD is the connection to the pool.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection

from shardwise.launch.process import kill_group
from shardwise.testing.worker import serve

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Imports the modules named, then serves "fork" and ("reap", pid) requests until the pool is gone."""
    connection = Connection(int(argv[0]))
    # Ctrl-C reaches every process of the terminal; the pool decides what it means for its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name in argv[1:]:
            importlib.import_module(name)
    except Exception:
        connection.send(("failed", traceback.format_exc()))
        return 1
    gc.collect()
    # Forked ranks share these objects; the collector would touch and so copy every page of them.
    gc.freeze()
    connection.send(("ready", ""))
    alive: set[int] = set()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            request = connection.recv()
            if request == "fork":
                pid = _fork(connection)
                alive.add(pid)
                connection.send(pid)
            else:
                pid = request[1]
                connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                alive.discard(pid)
    for pid in alive:
        kill_group(pid)
    return 0


def _fork(connection: Connection) -> int:
    descriptors = [reduction.recv_handle(connection) for _ in range(2)]
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        connection.close()
        serve(Connection(descriptors[0]), descriptors[1], parent)
        code = 0
    except BaseException:
        traceback.print_exc()
    # Never back into the zygote's own loop, and no exit handlers of the zygote.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
