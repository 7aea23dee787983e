"""The parent's handle of one rank: its process, its output, its result or failure."""

import json
import os
import pickle
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe

from shardwise.errors import Stopped
from shardwise.launch.child import DUMP_SIGNAL, Job
from shardwise.launch.failure import Failure, describe_exit, failure_of_server
from shardwise.launch.process import catches, is_stopped, kill_group
from shardwise.launch.starting import Starter

_CHUNK = 1 << 16
_TAIL_LINES = 30
_STACK_BEGINS = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")


@dataclass(frozen=True)
class Callbacks:
    """Functions that receive lines ``(rank, "stdout" | "stderr", line)`` and events ``(rank, event)``."""

    on_line: Callable[[int, str, str], None]
    on_event: Callable[[int, dict], None]


class RankProcess:
    """One started rank. ``streams`` lists the file descriptors to read; reading never blocks, because the launcher
    calls ``read`` only when there is something to read.
    """

    def __init__(self, rank: int, job: Job, env: Mapping[str, str], callbacks: Callbacks, starter: Starter):
        self.rank, self._callbacks = rank, callbacks
        self.result: bytes | None = None
        self.failure: Failure | None = None
        self.quit: Failure | None = None  # it called sys.exit(0): a failure if its peers failed because it was missing
        self.stopped: Stopped | None = None  # it was asked to stop, and has saved
        self.code: int | None = None
        self._stopped_since: float | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._starter = starter
        self._control, control = Pipe()
        self._events, events = os.pipe()
        try:
            self._process = starter.start(rank, env, control.fileno(), events)
        except BaseException:
            self._control.close()
            os.close(self._events)
            raise
        finally:
            control.close()
            os.close(events)
        self._stack: list[str] = []  # lines of a stack that has not shown a frame yet
        self._partial = {"stdout": b"", "stderr": b"", "event": b""}
        self._open = {
            self._process.stdout.fileno(): "stdout",
            self._process.stderr.fileno(): "stderr",
            self._events: "event",
            self._control.fileno(): "control",
        }
        self._job = job

    @property
    def pid(self) -> int:
        """Process id, and id of the group that holds the rank and its children."""
        return self._process.pid

    def begin(self) -> None:
        """Sends the job; if the rank has ended already, :meth:`poll` will find that."""
        try:
            self._control.send(self._job)
        except (BrokenPipeError, ConnectionResetError):
            self._open.pop(self._control.fileno(), None)

    def streams(self) -> list[int]:
        """File descriptors that may still deliver data."""
        return list(self._open)

    def read(self, descriptor: int) -> None:
        """Reads what ``descriptor`` has, and passes whole lines and events to the callbacks."""
        kind = self._open.get(descriptor)
        if kind is None:
            return
        if kind == "control":
            self._read_control(descriptor)
            return
        data = os.read(descriptor, _CHUNK)
        if not data:
            del self._open[descriptor]
        *lines, rest = (self._partial[kind] + data).split(b"\n")
        if rest and (not data or (len(rest) >= _CHUNK and kind != "event")):
            # At the end, or in a line without an end (a progress bar): pass on what was received.
            lines, rest = [*lines, rest], b""
        self._partial[kind] = rest
        for line in lines:
            self._deliver(kind, line)

    def _deliver(self, kind: str, line: bytes) -> None:
        if kind == "event":
            try:
                event = json.loads(line)
            except ValueError:
                # A rank killed in the middle of a line; how the rank ended is reported instead.
                return
            self._callbacks.on_event(self.rank, event)
            return
        text = line.decode("utf-8", "replace").rstrip("\r")
        lines = [text]
        if kind == "stderr":
            lines = self._without_empty_stack(text)
            self._tail.extend(lines)
        for whole in lines:
            self._callbacks.on_line(self.rank, kind, whole)

    def _without_empty_stack(self, line: str) -> list[str]:
        """The lines to pass on for one line of stderr. The header of a thread's stack is held back until its first
        frame; a stack without frames, as in a rank that is ending, is dropped."""
        if line.strip() == "<no Python frame>" and self._stack:
            self._stack = []
            return []
        if _STACK_BEGINS.fullmatch(line) or (line.strip() == "Garbage-collecting" and self._stack):
            self._stack.append(line)
            return []
        lines, self._stack = [*self._stack, line], []
        return lines

    def _read_control(self, descriptor: int) -> None:
        del self._open[descriptor]
        try:
            kind, answer = self._control.recv()
        except (EOFError, ConnectionResetError, pickle.UnpicklingError):
            return
        if kind == "result":
            self.result = answer
        elif kind == "quit":
            self.result, self.quit = pickle.dumps(None), answer
        elif kind == "stopped":
            self.stopped = answer
        else:
            self.failure = answer

    def poll(self) -> bool:
        """Whether the process has ended. When it first finds that, it kills the rank's children."""
        if self.code is None and self._process.poll() is not None:
            self.code = self._process.returncode
            kill_group(self.pid, alone=False)
        return self.code is not None

    def settle(self) -> None:
        """Called once the rank has ended and its output was read completely: turns a silent end into a failure."""
        if self.stopped is not None and self.code == Stopped.CODE:
            return
        if self.failure is None and (self.result is None or self.code):
            orphaned = self._starter.orphaned(self.pid)
            if orphaned is not None:
                self.failure = failure_of_server(self.rank, *orphaned)
                return
            self.failure = describe_exit(
                self.rank, self.code or 0, detail="\n".join(self._tail), finished=self.result is not None
            )

    def stopped_for(self) -> float:
        """Seconds for which the process has been seen stopped (SIGSTOP); 0 if it runs."""
        if not is_stopped(self.pid):
            self._stopped_since = None
            return 0.0
        now = time.monotonic()
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since

    def dump_stacks(self) -> None:
        """Makes the rank write the stack of each thread to its stderr, unless it is still starting: the signal would end it,
        and it would be named as the cause."""
        if catches(self.pid, DUMP_SIGNAL):
            self.tell(DUMP_SIGNAL)

    def tell(self, number: int) -> None:
        """Sends a signal to the rank alone: its children may not handle it, and the rank needs them to continue."""
        if not self.poll():
            self._process.send_signal(number)

    def signal(self, number: int) -> None:
        if not self.poll():
            kill_group(self.pid, number)

    def close(self) -> None:
        """Closes the file descriptors; the process has ended."""
        self._open.clear()
        self._control.close()
        os.close(self._events)
        for stream in (self._process.stdout, self._process.stderr):
            stream.close()
