"""How the process of a rank comes to be: as an interpreter of its own, or as a fork of one that has imported torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, reduction
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from shardwise.errors import RankError
from shardwise.launch.forkserver import Preload
from shardwise.launch.process import kill_group

__all__ = ["ForkServer", "Interpreters", "Started", "Starter"]

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class Started(Protocol):
    """The process of a rank, which leads a group of its own: what is used of ``subprocess.Popen``."""

    pid: int
    returncode: Any
    stdout: Any
    stderr: Any

    def poll(self) -> int | None:
        """Its exit code (below 0: a signal), which is in ``returncode`` from then on; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Sends a signal to the process alone."""


class Starter(Protocol):
    """What starts ranks."""

    def start(self, env: Mapping[str, str], control: int, events: int) -> Started:
        """Starts one, with that environment and copies of the two file descriptors."""


class Interpreters:
    """Starts a new interpreter for each rank."""

    def start(self, env: Mapping[str, str], control: int, events: int) -> Started:
        return _interpreter("shardwise.launch", env, control, events, output=subprocess.PIPE)


class ForkServer:
    """Starts one interpreter, which imports ``modules`` and is forked for each rank: a context manager that ends it.

    Args:
        modules: what is imported.
        env: what the ranks' environments have in common, as some of it is read at import.
        num_ranks: how many will be started; that many have to be.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str], num_ranks: int):
        self._modules, self._env, self._num_ranks = tuple(modules), env, num_ranks
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._connection, theirs = Pipe()
        self._process = _interpreter(
            "shardwise.launch.forkserver", self._env, theirs.fileno(), output=subprocess.DEVNULL
        )
        theirs.close()
        self._connection.send(Preload(modules=self._modules, path=tuple(sys.path), num_ranks=self._num_ranks))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        kill_group(self.pid)
        self._process.wait()

    @property
    def pid(self) -> int:
        """Process id, and id of a group of its own."""
        return self._process.pid

    def is_ready(self, wait_s: float | None) -> bool | None:
        """Waits for the imports: whether it can be forked. None: it has not said within ``wait_s`` seconds."""
        try:
            return self._connection.recv() if self._connection.poll(wait_s) else None
        except (EOFError, ConnectionResetError):
            return False

    def start(self, env: Mapping[str, str], control: int, events: int) -> Started:
        (stdout, their_stdout), (stderr, their_stderr) = os.pipe(), os.pipe()
        streams = os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0)
        try:
            self._connection.send(dict(env))
            for descriptor in (control, events, their_stdout, their_stderr):
                reduction.send_handle(self._connection, descriptor, self.pid)
            return _Forked(self, self._connection.recv(), *streams)
        except (EOFError, OSError) as error:
            for stream in streams:
                stream.close()
            raise RankError(
                "the ranks did not start",
                why="the process that is forked for each of them has ended",
                fix="look whether memory ran out (`dmesg`), and start fewer ranks",
            ) from error
        finally:
            os.close(their_stdout)
            os.close(their_stderr)

    def code_of(self, pid: int) -> int | None:
        """The exit code of a rank, None while it runs. Without their server ranks do not live: the system kills them."""
        try:
            while pid not in self._codes and self._connection.poll():
                ended, code = self._connection.recv()
                self._codes[ended] = code
        except (EOFError, ConnectionResetError):
            return self._codes.setdefault(pid, -signal.SIGKILL)
        return self._codes.get(pid)


class _Forked:
    def __init__(self, server: ForkServer, pid: int, stdout: IO[bytes], stderr: IO[bytes]):
        self._server, self.pid, self.stdout, self.stderr = server, pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid)
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _interpreter(module: str, env: Mapping[str, str], *descriptors: int, output: int) -> subprocess.Popen:
    """``python -m module DESCRIPTOR ... PID-OF-THIS``, with this package where it is found."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, descriptors), str(os.getpid())],
        env={**env, "PYTHONPATH": os.pathsep.join(filter(None, [_PACKAGE_ROOT, env.get("PYTHONPATH")]))},
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # A session of its own: Ctrl-C is the parent's to handle, and a signal reaches the children too.
        start_new_session=True,
    )
