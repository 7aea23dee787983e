"""Tools for operating-system processes: groups, states, death with the parent, a reserved port."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_GUARD_SCRIPT = str(Path(__file__).with_name("guard_process.py"))
_GUARD_ENDS_S = 2.0


def free_port() -> int:
    """A TCP port that nothing on 127.0.0.1 uses at this moment; another program may take it later: see held_port."""
    with held_port() as port:
        return port


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Reserves a TCP port for a rendezvous of child processes for as long as the context lasts.

    The socket is bound, never listens, and has SO_REUSEADDR: the system gives the port to no other program, while a
    child that sets SO_REUSEADDR too (torch's TCPStore does) may listen on it. So the port cannot be taken between
    choosing it and using it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when its parent ends, even if this process is stopped or busy in C code.

    Args:
        parent: process id of the parent, to notice a parent that died before the request was made.
    """
    if not sys.platform.startswith("linux"):
        return
    # Without prctl in libc the portable ways remain (the end of a pipe), which every caller has as well.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(pid: int, number: int = signal.SIGKILL, *, alone: bool = True) -> None:
    """Sends a signal to a process and its group (its own children included). A process that is gone is no error.

    Args:
        pid: id of the process that leads the group.
        number: the signal.
        alone: also signal the process itself, which has no group until it called setsid. False once it was waited
            for, because its id may then be reused.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return
    if alone:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # not Linux
        return threading.active_count()


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (state T of /proc/<pid>/stat); False where there is no /proc.

    A process held by a debugger (state t) does not count: whoever attached the debugger knows.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name in brackets may itself contain brackets and blanks: the state follows the last bracket.
    return text.rpartition(")")[2].split()[:1] == ["T"]


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal (SigCgt of /proc/<pid>/status); True where there is no
    /proc. One that is still starting has none yet, and most signals would end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "")
    return not caught or bool(int(caught, 16) >> (number - 1) & 1)


class Guard:
    """Runs the process that kills the ranks should this one be killed; see :mod:`shardwise.launch.guard_process`."""

    def __enter__(self) -> "Guard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD_SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_GUARD_ENDS_S)
        except subprocess.TimeoutExpired:  # it is stopped (SIGSTOP)
            self._process.kill()
            self._process.wait()

    def add(self, group: int) -> None:
        self._say(group)

    def remove(self, group: int) -> None:
        self._say(-group)

    def _say(self, number: int) -> None:
        # The guard itself may have been killed; the ranks then still have the system's own parent-death signal.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{number}\n".encode())  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
