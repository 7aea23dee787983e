"""The pool's side of its processes: the helper that forks ranks, and one handle per rank."""

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe

from shardwise.errors import RankError
from shardwise.launch.failure import Failure, describe_exit
from shardwise.launch.process import kill_group
from shardwise.launch.starting import ForkServer
from shardwise.testing.worker import DUMP_SIGNAL
from shardwise.testing.worker import main as serve_pool

_START_S = 180.0
_CLEAN_S = 10.0
_DUMP_S = 0.3
_TAIL = 8000
_ENV = {
    # One thread everywhere: ranks share the cores, and a process with threads must not be forked.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # torch's store looks up ::ffff:127.0.0.1 in DNS; a lost answer costs 5 s by default.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


class Helper:
    """The process that imports torch and is forked for each warm rank, started by the constructor."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str]):
        defaults = {name: os.environ.get(name, value) for name, value in _ENV.items()}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, **defaults, **env}
        runs = f"{serve_pool.__module__}:{serve_pool.__qualname__}"
        self._server = ForkServer(preload, environment, runs=runs, tells_ends=False)
        self._server.__enter__()
        self._ready = self._is_interrupted = False

    @property
    def pid(self) -> int:
        return self._server.pid

    def is_alive(self) -> bool:
        """Whether the helper can still fork ranks."""
        return not self._is_interrupted and self._server.is_alive()

    def fork(self, connection: int, output: int) -> int:
        """Forks a rank that owns copies of the two file descriptors; returns its process id. Waits until the imports
        are done."""
        self._wait_ready()
        try:
            return self._server.fork({}, [connection, output, output])
        except OSError:
            raise
        except BaseException:
            # Ctrl-C, or a test's own time limit. The answer is still to come, and would be read as the one to the next request: every
            # later rank would be known by the process id of another. The pool starts another helper.
            self._is_interrupted = True
            kill_group(self._server.pid)
            raise

    def reap(self, pid: int) -> int:
        """Waits for a rank that has ended or was killed; returns its exit code (negative: the signal)."""
        return self._server.reap(pid)

    def close(self) -> None:
        """Ends the helper and all processes that it forked."""
        self._server.__exit__(None, None, None)

    def _wait_ready(self) -> None:
        if self._ready:
            return
        is_ready = self._server.is_ready(_START_S)
        if not is_ready:
            raise RankError(
                "the test ranks did not start",
                why=self._server.why or f"no answer within {_START_S:.0f} s",
                fix="import the module named above in a plain interpreter; RankPool(preload=...) lists what is loaded",
            )
        self._ready = True


class Worker:
    """One warm rank; the constructor forks it."""

    def __init__(self, helper: Helper):
        self._helper = helper
        self.connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile(mode="a+b", buffering=0)  # noqa: SIM115 - closed by kill()
        # mode="a" does not set O_APPEND on the descriptor: without it a rank keeps writing at its old offset after a
        # truncation, and a reader sees a block of zeros.
        fcntl.fcntl(self._output, fcntl.F_SETFL, fcntl.fcntl(self._output, fcntl.F_GETFL) | os.O_APPEND)
        try:
            self.pid = helper.fork(theirs.fileno(), self._output.fileno())
        except BaseException as error:
            self.connection.close()
            self._output.close()
            if not isinstance(error, OSError):
                raise
            raise RankError(
                "a rank of the test pool did not start",
                why=str(error),
                fix="look whether memory, processes or open files are limited (`ulimit -a`), or use fewer ranks",
            ) from None
        finally:
            theirs.close()
        self._awaits_ready = True
        self._is_dead = False

    def send(self, message: object) -> None:
        """Sends a call or "clean". A rank that is gone is noticed later, when its answer is awaited."""
        self._awaits_ready = self._awaits_ready or message == "clean"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def is_clean(self) -> bool:
        """Waits, up to a limit, until the rank is ready for a run; False: it is not, and must be replaced."""
        try:
            if self._awaits_ready:
                if not self.connection.poll(_CLEAN_S) or self.connection.recv() != "ready":
                    return False
                self._awaits_ready = False
                self._output.truncate(0)
            # An idle rank sends nothing: if there is something to read, the rank has ended.
            return not self.connection.poll(0)
        except (EOFError, ConnectionResetError):
            return False

    def answer(self, rank: int) -> bytes | Failure:
        """Reads the answer of a rank whose connection is readable: its pickled result, or how it failed."""
        try:
            return self.connection.recv()[1]
        except (EOFError, ConnectionResetError):
            self._end()
            return describe_exit(rank, self._code, detail=self.tail())

    def hung(self, rank: int, timeout_s: float) -> Failure:
        """Describes a rank that did not answer in time, with the stack it is stuck in; ends it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, DUMP_SIGNAL)
        time.sleep(_DUMP_S)
        self._end()
        return Failure(
            rank=rank,
            what=f"did not finish within {timeout_s:g} s and was killed",
            detail=self.tail(),
            weight=4,
            hung=True,
            fix="see where it waited; raise timeout_s if it was only slow",
        )

    def tail(self) -> str:
        """The end of the output that the rank wrote since its last run began."""
        size = os.fstat(self._output.fileno()).st_size
        self._output.seek(max(0, size - _TAIL))
        return self._output.read().decode("utf-8", "replace").rstrip()

    def show_output(self, rank: int) -> None:
        """Prints the rank's output, with the rank before each line."""
        self._output.seek(0)
        for line in self._output.read().decode("utf-8", "replace").splitlines():
            print(f"[rank {rank}] {line}")

    def kill(self) -> None:
        """Kills the rank and its children, and closes its files."""
        self._end()
        self.connection.close()
        self._output.close()

    def _end(self) -> None:
        if self._is_dead:
            return
        self._is_dead = True
        # The helper has not reaped it yet, so the process id still belongs to this rank.
        code: int | None = None
        kill_group(self.pid)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, OSError):
            code = self._helper.reap(self.pid)
        self._code = code if code is not None else -9
