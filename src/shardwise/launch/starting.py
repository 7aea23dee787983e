"""Starts the process of a rank: as a new interpreter, or as a fork of one that has imported torch."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from shardwise.errors import RankError
from shardwise.launch.forkserver import Preload, send_descriptors
from shardwise.launch.process import is_stopped, kill_group

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_TICK_S = 0.1
_ANSWER_S = 30.0
_END_S = 1.0


class Started(Protocol):
    """The process of a rank, which leads its own process group: the used subset of ``subprocess.Popen``."""

    pid: int
    returncode: Any
    stdout: Any
    stderr: Any

    def poll(self) -> int | None:
        """Its exit code (below 0: a signal), also kept in ``returncode``; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Sends a signal to the process alone."""


class Starter(Protocol):
    """Something that starts ranks: :class:`Interpreters` or :class:`ForkServer`."""

    def start(self, rank: int, env: Mapping[str, str], control: int, events: int) -> Started:
        """Starts one rank with that environment and copies of the two file descriptors."""

    def orphaned(self, pid: int) -> tuple[int, int | None] | None:
        """For a rank that ended only because its fork server did: process id and exit code of the server; else None."""


class Interpreters:
    """Starts a new interpreter for each rank."""

    def start(self, rank: int, env: Mapping[str, str], control: int, events: int) -> Started:
        return _interpreter(env, control, events, output=subprocess.PIPE)

    def orphaned(self, pid: int) -> tuple[int, int | None] | None:
        return None


class ForkServer:
    """Starts one interpreter that imports ``modules`` and is forked for each rank. A context manager: its exit ends the
    server, and with it the ranks that still run.

    Args:
        modules: modules to import.
        env: the variables that the ranks' environments have in common, as some are read at import.
        options: ``runs`` and ``tells_ends`` of :class:`~shardwise.launch.forkserver.Preload`.

    Attributes:
        output: what the imports wrote to stdout and to stderr.
        why: the reason why it cannot be forked; "" while that is not known.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str], **options: Any):
        self.output, self.why = ["", ""], ""
        self._preload = Preload(modules=tuple(modules), path=tuple(sys.path), **options)
        self._env = env
        self._codes: dict[int, int] = {}
        self._orphans: set[int] = set()

    def __enter__(self) -> Self:
        self._connection, theirs = Pipe()
        self._process = _interpreter(self._env, "--serve", theirs.fileno(), output=subprocess.DEVNULL)
        theirs.close()
        with contextlib.suppress(OSError):  # it has ended; is_ready will find that
            self._connection.send(self._preload)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        kill_group(self.pid)
        self._process.wait()

    @property
    def pid(self) -> int:
        """Process id, and id of its own process group."""
        return self._process.pid

    def is_ready(self, wait_s: float) -> bool | None:
        """Whether it can be forked; None: the imports have not ended within ``wait_s`` seconds."""
        try:
            if not self._has_message(wait_s):
                return None
            word, self.output, self.why = self._connection.recv()
        except (EOFError, ConnectionResetError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)  # it has closed its connection
            self.why = f"the process that imports torch ended with status {self._process.returncode}"
            return False
        return word == "ready"

    def start(self, rank: int, env: Mapping[str, str], control: int, events: int) -> Started:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            readers: list[IO[bytes]] = []
            writers: list[int] = []
            try:
                for _ in range(2):
                    reader, writer = os.pipe()
                    theirs.callback(os.close, writer)
                    readers.append(ours.enter_context(os.fdopen(reader, "rb", 0)))
                    writers.append(writer)
                pid = self.fork(env, [control, events, *writers])
            except OSError as error:
                raise RankError(
                    f"rank {rank} did not start",
                    why=str(error),
                    fix="look whether memory, processes or open files are limited (`ulimit -a`), or start fewer ranks",
                    ranks=(rank,),
                ) from None
            ours.pop_all()
            return _Forked(self, pid, *readers)

    def fork(self, env: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Forks a rank with that environment and copies of ``descriptors``, of which the last two are its stdout and
        stderr. Returns its process id.

        Raises:
            OSError: no room (memory, processes, open files), or no server.
        """
        answer: Any
        try:
            self._connection.send((dict(env), len(descriptors)))
            send_descriptors(self._connection, descriptors)
            word, answer = self._answer()
        except (EOFError, OSError) as error:
            word, answer = "failed", f"no connection to the process that is forked: {type(error).__name__}: {error}"
        if word != "started":
            raise OSError(answer)
        return answer

    def reap(self, pid: int) -> int:
        """Waits for a rank that has ended or was killed, if the server does not report ends: its exit code."""
        self._connection.send(pid)
        for _ in range(round(_ANSWER_S / _TICK_S)):
            if self._codes.get(pid) is None and self._has_message(_TICK_S):
                self._note(self._connection.recv())  # perhaps the answer to a request that was interrupted
            if pid in self._codes:
                return self._codes.pop(pid)
        raise OSError(f"the process that is forked has not answered for {_ANSWER_S:g} s")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def code_of(self, pid: int) -> int | None:
        """The exit code of a rank, None while it runs. If the server has ended, the system has killed its ranks."""
        try:
            while pid not in self._codes and self._has_message(0.0):
                self._note(self._connection.recv())
        except (EOFError, ConnectionResetError):
            self._orphans.add(pid)
            return self._codes.setdefault(pid, -signal.SIGKILL)
        return self._codes.get(pid)

    def orphaned(self, pid: int) -> tuple[int, int | None] | None:
        if pid not in self._orphans:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)  # it has closed its connection
        return self.pid, self._process.returncode

    def _answer(self) -> tuple[str, Any]:
        """The answer to a request for a rank; messages about other ranks that have ended are noted on the way."""
        for _ in range(round(_ANSWER_S / _TICK_S)):
            if self._has_message(_TICK_S):
                message = self._connection.recv()
                if message[0] != "ended":
                    return message
                self._note(message)
        return "failed", f"the process that is forked has not answered for {_ANSWER_S:g} s"

    def _note(self, message: tuple[Any, ...]) -> None:
        if message[0] == "ended":  # else the answer to a start that was interrupted
            self._codes[message[1]] = message[2]

    def _has_message(self, wait_s: float) -> bool:
        if self._connection.poll(wait_s):
            return True
        if is_stopped(self.pid):
            os.kill(self.pid, signal.SIGCONT)  # a stopped server would not report ends
        return False


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
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _interpreter(env: Mapping[str, str], *words: str | int, output: int) -> subprocess.Popen:
    """Runs ``python -m shardwise.launch WORD ... PID`` (numbers among the words are descriptors), with this package on
    the path."""
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.launch", *map(str, words), str(os.getpid())],
        env={**env, "PYTHONPATH": os.pathsep.join(filter(None, [_PACKAGE_ROOT, env.get("PYTHONPATH")]))},
        pass_fds=[word for word in words if isinstance(word, int)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # A session of its own: the parent handles Ctrl-C, and a signal to the group also reaches the children.
        start_new_session=True,
    )
